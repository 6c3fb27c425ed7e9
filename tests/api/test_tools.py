"""Tools and reasoning through the unchanged openai SDK: what a model writes becomes calls, and what
a client writes stays data. The engine is the double that says what a test wants said.
"""

from __future__ import annotations

import io
import json
import re
from typing import Any

import openai
import pydantic
import pytest
from PIL import Image

from tests.helpers.images import data_url
from tests.helpers.served import TOKENIZER, Served

HI = [{"role": "user", "content": "Hi"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ARGUMENTS = '{"where": "ä \\"b\\"", "count": 3}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL_STOP = '<tool_call>\n{"name": "stop"}\n</tool_call>'


@pytest.fixture(scope="module")
def module_server(caller: Served) -> Served:
    return caller


def ask(served: Served, **fields: Any) -> Any:
    body = {"model": "demo", "messages": HI, "tools": [LOOK, STOP], **fields}
    return served.openai.chat.completions.create(**body)


def streamed(served: Served, **fields: Any) -> Any:
    """What the SDK's own helper makes of a stream."""
    body = {"model": "demo", "messages": HI, "tools": [LOOK, STOP], **fields}
    with served.openai.chat.completions.stream(**body) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def refused(served: Served, **fields: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, **fields)
    assert served.submitted == []
    return caught.value


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]


@pytest.mark.parametrize("way", [ask, streamed])
def test_calls_are_told_apart_from_text(served: Served, way: Any) -> None:
    for text, content, calls in (
        (CALL, None, [("look", ARGUMENTS)]),
        (f"I look.\n{CALL}\n{CALL_STOP}", "I look.", [("look", ARGUMENTS), ("stop", "{}")]),
    ):
        served.says(text)
        choice = way(served).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        assert calls_of(choice.message) == calls
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == len(calls) and all(
            re.fullmatch("call_[0-9a-f]{24}", i) for i in ids
        )


@pytest.mark.parametrize("way", [ask, streamed])
def test_a_malformed_call_is_text_to_the_letter(served: Served, way: Any) -> None:
    broken = [
        CALL.replace('": 3}', '": 03}'),
        CALL.removesuffix("</tool_call>"),
        "<tool_call>",
        f"{CALL[:30]} {CALL[:-4]}",
    ]
    for text in broken:
        served.says(text)
        choice = way(served).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", text)
        assert not choice.message.tool_calls


def test_a_call_that_the_length_cuts_off_is_text(served: Served) -> None:
    served.says(CALL)
    cut = ask(served, max_tokens=20, logprobs=True).choices[0]
    assert cut.finish_reason == "length" and CALL.startswith(cut.message.content)
    assert len(cut.logprobs.content) == 20 and not cut.message.tool_calls


def test_without_tools_an_answer_is_text(served: Served) -> None:
    served.says(f"<think>x</think>{CALL}")
    choice = ask(served, tools=openai.NOT_GIVEN).choices[0]
    assert choice.message.content == f"<think>x</think>{CALL}"
    assert choice.finish_reason == "stop" and "reasoning" not in choice.message.model_dump()


def test_a_stream_names_a_call_and_then_gives_its_arguments(served: Served) -> None:
    served.says(f"So:\n{CALL}\n{CALL_STOP}")
    chunks = list(
        ask(served, stream=True, n=2, logprobs=True, stream_options={"include_usage": True})
    )
    assert [chunk.choices for chunk in chunks[-1:]] == [[]] and chunks[-1].usage
    for number in range(2):
        choices = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == number]
        assert choices[0].delta.role == "assistant"
        assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
        texts = [c.delta.content for c in choices if c.delta.content]
        deltas = [call for c in choices for call in c.delta.tool_calls or ()]
        assert "".join(texts) == "So:"
        firsts = [d for d in deltas if d.id]
        assert [(d.index, d.type, d.function.name, d.function.arguments) for d in firsts] == [
            (0, "function", "look", ""),
            (1, "function", "stop", ""),
        ]
        for index, arguments in enumerate((ARGUMENTS, "{}")):
            own = [d for d in deltas if d.index == index]
            assert own[0].id and not any(d.id or d.type or d.function.name for d in own[1:])
            assert "".join(d.function.arguments for d in own) == arguments
        tokens = [t.token for c in choices if c.logprobs for t in c.logprobs.content]
        assert "".join(tokens) == f"So:\n{CALL}\n{CALL_STOP}<|im_end|>".replace("ä", "\ufffd\ufffd")


def test_a_stop_string_counts_in_what_the_model_writes(served: Served) -> None:
    served.says(f"{CALL} and so on")
    choice = ask(served, stop=["and"]).choices[0]
    assert calls_of(choice.message) == [("look", ARGUMENTS)]
    choice = ask(served, stop=["</tool_call>"]).choices[0]
    assert choice.message.content == CALL.removesuffix("</tool_call>")
    assert choice.finish_reason == "stop"


def test_without_parallel_calls_the_first_ends_the_answer(served: Served) -> None:
    served.says(f"{CALL}\n{CALL_STOP}\n{CALL}")
    for way in (ask, streamed):
        served.engine.received.clear()
        choice = way(served, parallel_tool_calls=False).choices[0]
        assert calls_of(choice.message) == [("look", ARGUMENTS)]
        assert choice.finish_reason == "tool_calls"
        assert served.engine.aborted == [served.submitted[0].id]


def test_no_tool_may_be_called_but_all_stay_in_the_prompt(served: Served) -> None:
    served.says(CALL)
    ask(served)
    choice = ask(served, tool_choice="none").choices[0]
    may, none = served.submitted
    assert may.tokens == none.tokens and '"name": "look"' in served.prompt
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_tools_are_shown_without_what_is_for_the_server(served: Served) -> None:
    function = {**LOOK["function"], "strict": False, "cache_control": {"type": "ephemeral"}}  # type: ignore[dict-item]
    ask(served, tools=[{"type": "function", "function": function}])
    assert json.dumps(LOOK, ensure_ascii=False) in served.prompt
    ask(served, tools=[STOP])
    shown = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps({"type": "function", "function": shown}) in served.prompt


def test_forced_calls_are_held_by_a_grammar_and_stream_as_they_come(served: Served) -> None:
    served.says(CALL)
    named = {"type": "function", "function": {"name": "look"}}
    some = {"mode": "required", "tools": [named]}
    for choice in ("required", named, {"type": "allowed_tools", "allowed_tools": some}):
        chunks = list(ask(served, tool_choice=choice, stream=True))
        deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
        assert (deltas[0].function.name, deltas[0].function.arguments) == ("look", "")
        assert len(deltas) > 5 and "".join(d.function.arguments for d in deltas) == ARGUMENTS
        assert "look" in served.submitted[-1].grammar
        assert ("stop" in served.submitted[-1].grammar) == (choice == "required")
    cut = ask(served, tool_choice="required", max_tokens=60).choices[0]
    ((name, arguments),) = calls_of(cut.message)
    assert name == "look" and ARGUMENTS.startswith(arguments) and arguments != ARGUMENTS
    assert (cut.finish_reason, cut.message.content) == ("length", None)


def test_json_can_be_asked_for_beside_tools(served: Served) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text in ('{"sum": 3}', CALL):
        served.says(text)
        message = ask(served, response_format=form).choices[0].message
        assert "sum" in served.submitted[-1].grammar and "look" in served.submitted[-1].grammar
        assert (message.content, len(message.tool_calls or ())) == (
            (text, 0) if text != CALL else (None, 1)
        )


class Look(pydantic.BaseModel):
    """Look closer."""

    where: str
    count: int


def test_the_sdk_parses_strict_tools(served: Served) -> None:
    served.says(CALL.replace("look", "Look"))
    answer = served.openai.chat.completions.parse(
        model="demo", messages=HI, tools=[openai.pydantic_function_tool(Look)]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Look(where='ä "b"', count=3)
    assert "where" in served.submitted[-1].grammar  # strict: a call that begins is one


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [STOP] * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
         "tools"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]},
         "tools[0].function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto",
          "tools": [{"type": "function", "function": {"name": "gone"}}]}}},
         "tool_choice.allowed_tools.tools[0]"),
        ({"parallel_tool_calls": 3}, "parallel_tool_calls"),
        ({"extra_body": {"stream_reasoning": False}}, "stream_reasoning"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    assert refused(served, **fields).param == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("function", "param"),
    [
        ({"parameters": []}, "parameters"),
        ({"parameters": {"type": "string"}}, "parameters.type"),
        ({"parameters": {"properties": [1]}}, "parameters.properties"),
        ({"parameters": {"properties": {"a": 1}}}, "parameters.properties"),
        ({"parameters": nested(80)}, "parameters"),
        ({"parameters": {"enum": ["x" * 200_000]}}, "parameters"),
        ({"description": "x" * 20_000}, "description"),
        ({"description": 3}, "description"),
        ({"strict": "yes"}, "strict"),
        ({"strict": True, "parameters": {"patternProperties": {}}}, "parameters"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named(
    served: Served, function: dict[str, Any], param: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", **function}}
    error = refused(served, tools=[STOP, tool])
    assert error.param.startswith(f"tools[1].function.{param}")
    assert len(error.message) < 400


def picture(color: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(file, "PNG")
    url = data_url(file.getvalue())
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_agent_goes_on_with_images_in_the_results(served: Served) -> None:
    """Each turn sends back what the SDK was given; the prompt grows at its end alone."""
    messages: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": ["What is there?", picture("red")]},
    ]
    prompts: list[tuple[int, ...]] = []
    for turn, color in enumerate(("green", "blue")):
        served.says(f"I look.\n{CALL}")
        message = ask(served, messages=messages).choices[0].message
        prompts.append(served.submitted[-1].tokens)
        (call,) = message.tool_calls
        result = {"type": "text", "text": f"turn {turn}"}
        messages += [
            message,
            {"role": "tool", "tool_call_id": call.id, "content": [result, picture(color)]},
        ]
    served.says("Done.")
    assert ask(served, messages=messages).choices[0].message.content == "Done."
    last = served.submitted[-1]
    assert len(last.images) == 3 and len({image.key for image in last.images}) == 3
    text = served.prompt
    assert text.count(CALL) == 2 and text.count("<tool_response>\nturn ") == 2
    for before in prompts:
        assert last.tokens[: len(before)] == before


def test_what_a_client_writes_anywhere_of_tools_is_data(served: Served) -> None:
    """Special tokens of the prompt are the template's alone: as many as without their names."""
    special = [
        i for i, token in TOKENIZER.backend.get_added_tokens_decoder().items() if token.special
    ]

    def count(word: str) -> list[int]:
        schema = {
            "type": "object",
            "properties": {word: {"enum": [word], "description": word}},
            "title": word,
        }
        function = {"name": "look", "description": word, "parameters": schema}
        made = {"name": word, "arguments": json.dumps({word: [word, {word: word}]})}
        broken = {"name": "look", "arguments": "{" + word}
        messages = [
            *HI,
            {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [
                {"id": word, "type": "function", "function": made},
                {"id": "b", "type": "function", "function": broken}]},
            {"role": "tool", "tool_call_id": word, "content": word, "name": word},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": word}]},
        ]  # fmt: skip
        ask(served, messages=messages, tools=[{"type": "function", "function": function}])
        tokens = served.submitted[-1].tokens
        assert served.prompt.count(word) >= 9
        return [tokens.count(each) for each in special]

    assert count("<|im_end|>") == count("<|im_start|>") == count("nothing")
    assert count("<|image_pad|>") == count("nothing")


def test_calls_of_a_transcript_are_bounded(served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for calls, param in (
        ([call] * 257, "messages[1].tool_calls"),
        ([{**call, "id": "x" * 600}], "messages[1].tool_calls.id"),
        ([{**call, "function": {"name": "x" * 600}}], "messages[1].tool_calls.function.name"),
    ):
        error = refused(served, messages=[*HI, {"role": "assistant", "tool_calls": calls}])
        assert error.param.replace("[0]", "") == param
    for message in (
        {"role": "assistant", "reasoning_content": "x" * 3_000_000},
        {"role": "assistant", "tool_calls": [
            {**call, "function": {"name": "f", "arguments": "x" * 3_000_000}}]},
    ):  # fmt: skip
        assert refused(served, messages=[*HI, message]).code == "context_length_exceeded"


# ---- reasoning


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(thinker: Served, stream: bool) -> None:
    called = "<function=look>\n<parameter=where>\nx\n</parameter>\n</function>"
    thinker.says(f"Let me see.\n</think>\n\nSo.\n<tool_call>\n{called}\n</tool_call>")
    choice = (streamed if stream else ask)(thinker).choices[0]
    extra = choice.message.model_extra
    assert extra["reasoning_content"] == extra["reasoning"] == "Let me see."
    assert choice.message.content == "So."
    assert calls_of(choice.message) == [("look", '{"where": "x"}')]
    assert thinker.prompt.endswith("<|im_start|>assistant\n<think>\n")


def test_reasoning_can_be_left_out_or_left_in(thinker: Served) -> None:
    thinker.says("Hm.\n</think>\n\nSo.")
    for fields, content, reasoning in (
        ({}, "So.", "Hm."),
        ({"include_reasoning": False}, "So.", None),
        ({"reasoning": {"exclude": True}}, "So.", None),
        ({"separate_reasoning": False}, "Hm.\n</think>\n\nSo.", None),
    ):
        for tools in ([LOOK], openai.NOT_GIVEN):
            message = ask(thinker, tools=tools, extra_body=fields).choices[0].message
            assert message.content == content
            assert (message.model_extra or {}).get("reasoning_content") == reasoning


def test_a_forced_call_comes_after_the_reasoning(thinker: Served) -> None:
    xml = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    thinker.says(f"I <tool_call> it.\n</think>\n\n{xml}")
    chunks = list(ask(thinker, tool_choice="required", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join((each.model_extra or {}).get("reasoning", "") for each in deltas)
    assert reasoning == "I <tool_call> it."
    assert [call.function.name for each in deltas for call in each.tool_calls or () if call.id] == [
        "stop"
    ]
    assert "think" in thinker.submitted[-1].grammar
