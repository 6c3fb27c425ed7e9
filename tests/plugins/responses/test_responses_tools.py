"""Tools and reasoning through /v1/responses and the unchanged SDK, turn after turn, with images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from saccade.core.errors import InvalidRequest
from saccade.plugins.responses.options import ResponseOptions
from saccade.plugins.responses.other_items import LEFT_OUT
from saccade.plugins.responses.read import read_responses
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, serving
from tests.plugins.responses.test_responses import (
    FUNCTION,
    asked_of,
    chat_of,
    create,
    image,
    refusal,
    text,
    user,
)

ARGUMENTS = '{"where": "left"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def module_server(caller: Served) -> Served:
    return caller


def test_a_call_is_an_item_and_its_result_continues_the_chain(served: Served) -> None:
    served.says(f"I look.\n{CALL}")
    first = create(served, [user(text("What?"), image())], tools=[FUNCTION])
    said, call = first.output
    assert said.content[0].text.strip() == "I look." and said.status == "completed"
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "look",
        {"where": "left"},
    )
    served.says("A cat.")
    shown = [text("closer:"), image(detail="low")]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": shown}
    second = create(served, [result], previous_response_id=first.id, tools=[FUNCTION])
    assert second.output_text == "A cat."
    one, two = served.submitted
    assert two.tokens[: len(one.tokens)] == one.tokens and len(two.images) == 2
    assert "I look." in TOKENIZER.decode(two.tokens) and CALL in TOKENIZER.decode(two.tokens)
    given = [user(text("What?"), image()), *(item.to_dict() for item in first.output), result]
    create(served, given, tools=[FUNCTION])
    assert served.submitted[2].tokens == two.tokens


def test_a_call_is_streamed_as_the_sdk_reads_it(served: Served) -> None:
    served.says(CALL)
    asked: Any = {"model": "demo", "input": "Hi", "tools": [FUNCTION]}
    with served.openai.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type.removeprefix("response.") for event in events]
    assert names[2] == "output_item.added" and events[2].item.name == "look"
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments == final.output[0].arguments
    assert json.loads(done.arguments) == {"where": "left"}


def test_a_call_that_must_be_made_is_a_grammar(served: Served) -> None:
    served.says(CALL)
    named = {"type": "function", "name": "look"}
    for choice in ("required", named):
        answer = create(served, tools=[FUNCTION], tool_choice=choice, parallel_tool_calls=False)
        assert answer.output[0].name == "look" and served.submitted[-1].grammar
    create(served, tools=[FUNCTION])
    assert not served.submitted[-1].grammar
    unknown = refusal(served, tools=[FUNCTION], tool_choice={"type": "function", "name": "fly"})
    assert unknown.param is not None and unknown.param.startswith("tool_choice")
    bad = {**FUNCTION, "parameters": {"type": "strange"}}
    assert refusal(served, tools=[bad], tool_choice="required").param.startswith("tools[0].")


def test_thoughts_are_told_counted_and_taken_back(thinker: Served) -> None:
    thinker.says("Hm, hm.</think>\n\nA cat.")
    whole = create(thinker)
    thought, said = whole.output
    assert thought.type == "reasoning" and thought.content[0].text.strip() == "Hm, hm."
    assert said.content[0].text.strip() == "A cat."
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(create(thinker, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names.index("reasoning_text.done") < names.index("output_text.delta")
    again = [user(text("Hi")), *(item.to_dict() for item in whole.output), user(text("Sure?"))]
    assert create(thinker, again).output_text.strip() == "A cat."
    unswitched = create(thinker, reasoning={"effort": "none"})  # its template has no switch
    assert unswitched.usage.output_tokens_details.reasoning_tokens > 0


# ---- tools that this server does not run, and what other servers did with them


def kinds(union: Any) -> Iterator[str]:
    """The types of all that the SDK may send."""
    for each in get_args(union):
        kind = get_type_hints(each)["type"]
        if get_origin(kind) is not Literal:  # Optional
            kind = get_args(kind)[0]
        yield from get_args(kind)


OWN_TOOLS = {"function", "computer", "computer_use_preview"}
OTHER_TOOLS = sorted({*kinds(ToolParam), "namespace", "one_day"} - OWN_TOOLS)
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [text("Hi")]}],
    "tools": [FUNCTION, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": [],
    "prompt_cache_key": "k",
    "client_metadata": {"installation": "x"},
}


def test_the_tools_of_the_sdk_are_those_tried() -> None:
    assert {"web_search", "custom", "mcp", "shell", "apply_patch", "tool_search"} <= {*OTHER_TOOLS}


def test_a_coding_agents_request_is_answered(served: Served) -> None:
    served.says("Hello!")
    whole = served.http.post("/v1/responses", json={"model": "demo", **CODEX})
    assert whole.status_code == 200, whole.text
    assert [tool["type"] for tool in whole.json()["tools"]] == ["function"]
    ignored = [{"param": "tools[1]", "type": "web_search"}]
    assert whole.json()["saccade"] == {"ignored_tools": ignored}
    traced = {**CODEX, "saccade": {"trace": True}}
    again = served.http.post("/v1/responses", json={"model": "demo", **traced}).json()
    assert again["saccade"]["ignored_tools"] == ignored and "images" in again["saccade"]
    one, two = served.submitted
    assert one.tokens == two.tokens


def test_tools_that_are_not_run_are_left_out_of_the_prompt(served: Served) -> None:
    served.says("Hello!")
    alone = create(served, tools=[FUNCTION])
    others = [{"type": kind, "name": "x"} for kind in OTHER_TOOLS]
    beside: Any = create(served, tools=[*others, FUNCTION])
    assert [each["type"] for each in beside.saccade["ignored_tools"]] == OTHER_TOOLS
    assert not hasattr(alone, "saccade") and beside.output_text == alone.output_text
    one, two = served.submitted
    assert one.tokens == two.tokens
    create(served, tools=others, tool_choice="auto")
    create(served)
    _, _, three, four = served.submitted
    assert three.tokens == four.tokens


@pytest.mark.parametrize("kind", OTHER_TOOLS)
def test_a_choice_of_a_tool_that_is_not_run_is_refused_by_name(kind: str) -> None:
    tools = [FUNCTION, {"type": kind, "name": "x"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
    for choice, param in (
        ({"type": kind, "name": "x"}, "tool_choice"),
        (allowed, "tool_choice.tools[0]"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            asked_of(user(text("x")), tools=tools, tool_choice=choice)
        assert refused.value.param == param
    with pytest.raises(InvalidRequest) as refused:
        body = json.dumps({"input": "x", "tools": tools}).encode()
        read_responses(bytearray(body), 512, refuse_tools=True)
    assert refused.value.param == "tools[1].type" and kind in refused.value.message


def test_a_server_may_refuse_tools_that_it_does_not_run() -> None:
    with serving(extras=(ResponseOptions(refuse_unsupported_tools=True),)) as strict:
        error = refusal(strict, tools=[FUNCTION, {"type": "web_search"}])
        assert error.status_code == 400 and error.param == "tools[1].type"


@pytest.mark.parametrize("tool", [{}, {"type": None}, {"type": 5}, {"name": "x"}])
def test_a_tool_without_a_type_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked_of(user(text("x")), tools=[tool])
    assert refused.value.param == "tools[0].type"


PICTURE = data_url(png())
ENCODED = PICTURE.partition(",")[2]
CALL_ID = {"call_id": "c1"}
CALLED: dict[str, tuple[dict[str, Any], str, Any]] = {
    "apply_patch_call": (
        {**CALL_ID, "operation": {"type": "delete_file", "path": "a"}, "status": "completed"},
        "apply_patch",
        {"type": "delete_file", "path": "a"},
    ),
    "code_interpreter_call": ({"id": "c1", "code": "1+1"}, "code_interpreter", {"code": "1+1"}),
    "custom_tool_call": ({**CALL_ID, "name": "patch", "input": "{}"}, "patch", {"input": "{}"}),
    "file_search_call": ({"id": "c1", "queries": ["a"]}, "file_search", {"queries": ["a"]}),
    "image_generation_call": ({"id": "c1"}, "image_generation", {}),
    "local_shell_call": (
        {**CALL_ID, "id": "x", "action": {"type": "exec", "command": ["ls"]}},
        "local_shell",
        {"type": "exec", "command": ["ls"]},
    ),
    "mcp_call": ({"id": "c1", "name": "ask", "arguments": '{"a": 1}'}, "ask", {"a": 1}),
    "program": ({**CALL_ID, "id": "x", "code": "go"}, "program", {"code": "go"}),
    "shell_call": ({**CALL_ID, "action": {"commands": ["ls"]}}, "shell", {"commands": ["ls"]}),
    "tool_search_call": ({**CALL_ID, "arguments": {"q": "a"}}, "tool_search", {"q": "a"}),
    "web_search_call": (
        {"id": "c1", "action": {"type": "search", "query": "a"}, "status": "completed"},
        "web_search",
        {"type": "search", "query": "a"},
    ),
    "one_day_call": ({**CALL_ID, "input": {"a": 1}}, "one_day", {"a": 1}),
}
RESULTS: list[tuple[str, dict[str, Any], str]] = [
    ("apply_patch_call_output", {**CALL_ID, "status": "failed", "output": "no"}, "no"),
    ("apply_patch_call_output", {**CALL_ID, "status": "completed"}, "completed"),
    ("custom_tool_call_output", {**CALL_ID, "output": "done"}, "done"),
    ("custom_tool_call_output", {**CALL_ID, "output": [text("done")]}, "done"),
    ("local_shell_call_output", {"id": "c1", "output": "a b"}, "a b"),
    ("program_output", {**CALL_ID, "id": "x", "result": "2", "status": "completed"}, "2"),
    ("shell_call_output", {**CALL_ID, "output": [{"stdout": "a"}]}, '[{"stdout":"a"}]'),
    ("tool_search_output", {**CALL_ID, "tools": [{"name": "a"}]}, '[{"name":"a"}]'),
    ("one_day_call_output", {**CALL_ID, "output": "done"}, "done"),
]
BROUGHT: list[tuple[str, dict[str, Any], str]] = [
    ("code_interpreter_call", {"outputs": [{"type": "logs", "logs": "2"}]}, "2"),
    ("file_search_call", {"results": [{"text": "b"}]}, '[{"text":"b"}]'),
    ("image_generation_call", {"status": "failed"}, "failed"),
    ("image_generation_call", {"status": "completed", "result": ""}, "completed"),
    ("image_generation_call", {"result": ""}, ""),
    ("image_generation_call", {}, ""),
    ("mcp_call", {"output": "found"}, "found"),
    ("mcp_call", {"error": {"type": "x"}}, '{"type":"x"}'),
    ("web_search_call", {}, "completed"),
    ("one_day_call", {"output": "done"}, "done"),
]
OWN_ITEMS = {
    "message",
    "function_call",
    "function_call_output",
    "computer_call",
    "computer_call_output",
    "reasoning",
    "item_reference",
}


def test_the_items_of_the_sdk_are_those_tried() -> None:
    tried = {*OWN_ITEMS, *CALLED, *(kind for kind, _, _ in RESULTS), *LEFT_OUT}
    assert {*kinds(ResponseInputItemParam)} <= tried


@pytest.mark.parametrize("kind", CALLED)
def test_a_call_of_another_servers_tool_is_a_call_to_the_model(kind: str) -> None:
    fields, name, arguments = CALLED[kind]
    chat = chat_of(asked_of(user(text("x")), {"type": kind, **fields}))
    (call,) = chat.messages[1].fields["tool_calls"]
    assert call["function"] == {"name": name, "arguments": arguments} and call["id"] == "c1"


@pytest.mark.parametrize(("kind", "fields", "output"), RESULTS)
def test_a_result_of_another_servers_tool_is_a_tools_result(
    kind: str, fields: dict[str, Any], output: str
) -> None:
    chat = chat_of(asked_of(user(text("x")), {"type": kind, **fields}))
    told = chat.messages[1]
    assert told.role == "tool" and told.fields["tool_call_id"] == "c1"
    assert output in (told.content, getattr(told.parts[0], "text", None) if told.parts else None)


@pytest.mark.parametrize(("kind", "fields", "output"), BROUGHT)
def test_a_call_that_brings_its_result_is_both(
    kind: str, fields: dict[str, Any], output: str
) -> None:
    item = {"type": kind, **CALLED[kind][0], **fields}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    _, called, told, answer = chat_of(asked_of(user(text("x")), item, said)).messages
    assert (called.role, told.role, answer.content) == ("assistant", "tool", "So.")
    assert output in (told.content, getattr(told.parts[0], "text", None) if told.parts else None)


def test_a_picture_that_another_servers_tool_made_is_seen(served: Served) -> None:
    served.says("A cat.")
    made = {"type": "image_generation_call", "id": "c1", "status": "completed", "result": ENCODED}
    plot = [{"type": "image", "url": PICTURE}]
    run = {"type": "code_interpreter_call", "id": "c2", "code": "plot()", "outputs": plot}
    create(served, [user(text("Draw.")), made, run, user(text("What?"))])
    assert len(served.submitted[0].images) == 2
    broken = {**made, "result": "AAAA"}
    assert refusal(served, [user(text("Draw.")), broken]).param == "input[1].result[0]"


@pytest.mark.parametrize("kind", sorted(LEFT_OUT))
def test_an_item_that_carries_nothing_for_the_model_is_left_out(kind: str) -> None:
    item = {"type": kind, "id": "x", "encrypted_content": "gAAA", "tools": []}
    plain = asked_of(user(text("a")), user(text("b")))
    moved = asked_of(user(text("a")), item, user(text("b")))
    assert [each.content[0].text for each in chat_of(moved).messages] == ["a", "b"]  # type: ignore[index, union-attr]
    assert chat_of(plain).messages[0] == chat_of(moved).messages[0]
    assert chat_of(moved).messages[1].place == "input[2].content"


def test_a_conversation_that_began_elsewhere_goes_on_by_its_response(served: Served) -> None:
    served.says("Done.")
    given = [
        user(text("Patch it.")),
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        user(text("And?")),
    ]
    first = create(served, given)
    create(served, [user(text("More?"))], previous_response_id=first.id)
    one, two = served.submitted
    assert two.tokens[: len(one.tokens)] == one.tokens
    assert "*** Begin" in TOKENIZER.decode(one.tokens)
    listed = served.openai.responses.input_items.list(first.id, order="asc").data
    assert [each.type for each in listed] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


@pytest.mark.parametrize("given", [[], [{"type": "compaction", "encrypted_content": "g"}]])
def test_an_empty_input_is_an_empty_text(given: list[Any]) -> None:
    assert chat_of(asked_of(*given)).messages[0].content == ""


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "custom_tool_call", "call_id": 5, "name": "a", "input": ""}, "call_id"),
        ({"type": "custom_tool_call", "call_id": "c", "name": [], "input": ""}, "name"),
        ({"type": "custom_tool_call", "call_id": "c" * 300, "name": "a", "input": ""}, "call_id"),
        ({"type": "mcp_call", "id": "c", "name": "x" * 600, "arguments": ""}, "name"),
        ({"type": "strange"}, "type"),
    ],
)
def test_a_broken_item_is_refused_by_name(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked_of(user(text("x")), item)
    assert refused.value.param == f"input[1].{param}"
