"""Anthropic's bodies and events, beside what the unchanged SDK sends and reads."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2 as httpx
import msgspec
import pytest
from anthropic.types import Message

from saccade.core.errors import InvalidRequest, Overloaded
from saccade.edge.refusal import error_body
from saccade.front.conversation import Chat, MessageText, tool_call
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.sources.source import Base64, FileId, ImageSource
from saccade.plugins.messages.read import read_count, read_message
from saccade.plugins.messages.write import MessageStream, MessageUsage, WholeMessage, read_input
from saccade.text.answer.answer_format import FORMATS
from saccade.text.answer.events import CallArguments, CallStarted
from saccade.text.answer.reader import AnswerReader
from saccade.text.grammar.constraint import OutputConstraint

PIXEL = "iVBORw0KGgo="
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look closer",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
CONTEXT = 1 << 20
USAGE = MessageUsage(fresh=7, written=20, read=300, output=0)


def client_of(answer: Any) -> anthropic.Anthropic:
    """The SDK, whose requests go to the function `answer`."""
    return anthropic.Anthropic(
        api_key="x",
        base_url="http://saccade.test",
        max_retries=0,
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
    )


def read(body: dict[str, Any]) -> GenerationRequest:
    return read_message(bytearray(msgspec.json.encode(body)), CONTEXT).requests[0]


def chat_of(ask: GenerationRequest) -> Chat:
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def sent(**fields: Any) -> GenerationRequest:
    """What the SDK's request for `fields` asks for."""
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(200, json=whole_message(events_of("Hi")))

    client = client_of(answer)
    message = client.messages.create(**{"model": "m", "max_tokens": 9, **fields})
    assert isinstance(message, Message)
    return read_message(bytearray(bodies[0]), CONTEXT).requests[0]


def events_of(text: str, finish: Any = "stop", stop: str | None = None, **how: Any) -> list[Any]:
    """The stream of an answer that came letter by letter."""
    reader = AnswerReader("either", FORMATS["hermes"], {}, make_id=lambda: "toolu_1", **how)
    stream = MessageStream("msg_1", "m")
    events = stream.opening_events(USAGE)
    for letter in text:
        events += stream.feed(reader.feed(letter))
    events += stream.feed(reader.end())
    return events + stream.closing_events(finish, stop, MessageUsage(7, 20, 300, 12))


def whole_message(events: list[Any]) -> dict[str, Any]:
    """The message that a whole stream tells of."""
    message = WholeMessage()
    for event in events:
        message.add_event(event)
    return message.body()


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def image(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "image", "source": source, **more}


BASE64 = {"type": "base64", "media_type": "image/png", "data": PIXEL}


def test_pictures_come_as_bytes_addresses_and_files() -> None:
    made = sent(
        messages=[
            user(
                text("What?"),
                image(BASE64),
                image({"type": "url", "url": "https://a/b.png"}),
                image({"type": "file", "file_id": "file-1"}),
            )
        ]
    )
    (message,) = chat_of(made).messages
    assert message.role == "user"
    assert message.content == (
        MessageText("What?", "messages[0].content[0]"),
        ImageSource(Base64(PIXEL), "messages[0].content[1]"),
        ImageSource("https://a/b.png", "messages[0].content[2]"),
        ImageSource(FileId("file-1"), "messages[0].content[3]"),
    )
    assert made.sampling["max_tokens"] == 9 and not chat_of(made).marks


def test_a_transcript_of_an_agent_becomes_a_chat() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "é"}}
    again = {**use, "id": "toolu_2", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image(BASE64)]}
    failed = {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "content": "no such place",
        "is_error": True,
    }
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    made = sent(
        system=[text("Be short."), text("Be kind.")],
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "Find it"},
            {"role": "assistant", "content": [thought, text("I look."), use, again]},
            user(result, failed, text("Well?")),
        ],
    )
    chat = chat_of(made)
    calls = [
        tool_call("toolu_1", "look", {"where": "é"}),
        tool_call("toolu_2", "look", {}),
    ]
    assert [(each.role, each.content, each.fields) for each in chat.messages] == [
        (
            "system",
            (MessageText("Be short.", "system[0]"), MessageText("Be kind.", "system[1]")),
            {},
        ),
        ("user", "Find it", {}),
        (
            "assistant",
            (MessageText("I look.", "messages[1].content[1]"),),
            {"reasoning_content": "Hm.", "tool_calls": calls},
        ),
        (
            "tool",
            (ImageSource(Base64(PIXEL), "messages[2].content[0].content[0]"),),
            {"tool_call_id": "toolu_1"},
        ),
        (
            "tool",
            (
                MessageText("Error: ", "messages[2].content[1]"),
                MessageText("no such place", "messages[2].content[1].content"),
            ),
            {"tool_call_id": "toolu_2"},
        ),
        ("user", (MessageText("Well?", "messages[2].content[2]"),), {}),
    ]
    places = [each.place for each in chat.messages]
    assert places[:3] == ["system", "messages[0].content", "messages[1].content"]
    assert chat.tools is not None
    (tool,) = chat.tools.tools
    assert (tool.name, tool.description, tool.parameters) == (
        "look",
        "Look closer",
        TOOL["input_schema"],
    )
    assert (tool.place, tool.param) == ("tools[0]", "tools[0].input_schema")


def test_marks_are_kept_by_place() -> None:
    mark, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [text("a", cache_control=mark)],
        "cache_control": hour,
    }
    made = sent(
        system=[text("s", cache_control=hour)],
        tools=[{**TOOL, "cache_control": mark}],
        messages=[user(text("q"), image(BASE64, cache_control=mark)), user(result, text("b"))],
        cache_control=mark,
    )
    assert [
        (each.place, each.seconds, each.message, each.part) for each in chat_of(made).marks
    ] == [
        ("tools[0].cache_control", 300, None, None),
        ("system[0].cache_control", 3600, 0, 0),
        ("messages[0].content[1].cache_control", 300, 1, 1),
        ("messages[1].content[0].content[0].cache_control", 300, 2, 0),
        ("messages[1].content[0].cache_control", 3600, 2, None),
        ("cache_control", 300, 3, None),
    ]


@pytest.mark.parametrize(
    ("choice", "openais", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "none"}, "none", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        (
            {"type": "tool", "name": "look"},
            {"type": "function", "function": {"name": "look"}},
            True,
        ),
    ],
)
def test_a_tool_choice_is_openais(choice: Any, openais: Any, parallel: bool) -> None:
    ask = read(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "q"}],
         "tools": [{**TOOL, "eager_input_streaming": True}], "tool_choice": choice},
    )  # fmt: skip
    tools = chat_of(ask).tools
    assert tools is not None
    assert (tools.choice, tools.parallel) == (openais, parallel)


def test_the_rest_of_a_body_becomes_settings() -> None:
    made = sent(
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "The ans"}],
        stop_sequences=["\n\n"],
        thinking={"type": "disabled"},
        metadata={"user_id": "u"},
        service_tier="auto",
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    )
    assert made.sampling == {"max_tokens": 9, "stop": ("\n\n",)}
    assert made.constraint == OutputConstraint("json", {}, "output_config.format.schema")
    chat = chat_of(made)
    assert chat.thinks is False and not chat.variables
    assert chat.continue_final_message and not chat.add_generation_prompt


def test_tokens_are_counted_of_the_same_chat() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(200, json={"input_tokens": 3})

    asked = {"model": "m", "messages": [user(text("q"), image(BASE64))], "tools": [TOOL]}
    client_of(answer).messages.count_tokens(**asked)  # type: ignore[arg-type]
    counted = read_count(bytearray(bodies[0]), CONTEXT).requests[0]
    assert chat_of(counted) == chat_of(sent(**asked))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"container": "c"},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": []},
        {"thinking": {"type": "between_tools"}},
        {"cache_control": {"type": "ephemeral", "ttl": 9}},
    ],
)
def test_what_is_not_supported_is_refused_by_the_schema(fields: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "q"}], **fields}
    (name,) = fields
    with pytest.raises(InvalidRequest) as refused:
        read(body)
    assert str(refused.value.param).startswith(name)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "assistant", "content": [image(BASE64)]}], "messages[0].content[0]"),
        (
            [user(text("a"), {"type": "tool_use", "id": "i", "name": "n", "input": {}})],
            "messages[0].content[1]",
        ),
    ],
)
def test_a_block_in_the_wrong_place_is_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read({"model": "m", "max_tokens": 1, "messages": messages})
    assert refused.value.param == param


CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "é", "n": [1]}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.mark.parametrize("eager", [False, True])
def test_a_stream_has_anthropics_order(eager: bool) -> None:
    events = events_of(ANSWER, eager=eager)
    order = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    once = [step for at, step in enumerate(order) if at == 0 or order[at - 1] != step]
    start, delta, stop = (f"content_block_{what}" for what in ("start", "delta", "stop"))
    assert once == [
        ("message_start", None, None),
        ("ping", None, None),
        (start, 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, None),
        (delta, 1, "text_delta"),
        (stop, 1, None),
        (start, 2, None),
        (delta, 2, "input_json_delta"),
        (stop, 2, None),
        (start, 3, None),
        (delta, 3, "input_json_delta"),
        (stop, 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


@pytest.mark.parametrize("eager", [False, True])
def test_the_sdk_reads_a_stream_as_the_whole_message(eager: bool) -> None:
    events = events_of(ANSWER, eager=eager)

    def answer(request: httpx.Request) -> httpx.Response:
        lines = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        return httpx.Response(200, text=lines, headers={"content-type": "text/event-stream"})

    question: Any = [{"role": "user", "content": "q"}]
    with client_of(answer).messages.stream(model="m", max_tokens=9, messages=question) as stream:
        words = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert words == "I look."
    whole = Message.model_validate(whole_message(events))
    read = [block.model_dump(exclude={"parsed_output"}) for block in final.content]
    assert read == [block.model_dump() for block in whole.content]
    assert (final.stop_reason, final.usage) == ("tool_use", whole.usage)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert read[2]["input"] == {"where": "é", "n": [1]}
    assert whole.usage.cache_read_input_tokens == 300


@pytest.mark.parametrize(
    ("words", "finish", "stop", "reason"),
    [
        ("Hi", "stop", None, "end_turn"),
        ("Hi", "length", None, "max_tokens"),
        ("Hi", "stop", "\n\n", "stop_sequence"),
        (CALL, "stop", None, "tool_use"),
        (CALL[:-3], "stop", None, "end_turn"),
        (CALL, "length", None, "max_tokens"),
    ],
)
def test_an_answer_says_why_it_ended(words: str, finish: str, stop: Any, reason: str) -> None:
    message = whole_message(events_of(words, finish, stop))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"where": "he', b"{}"),  # the length has cut it off: once, a 500
        ('{"n": 123456789012345678901234567890}', b'{"n":123456789012345678901234567890}'),
        ('{"n": [1e999, 2.5, -3]}', b'{"n":[1e999,2.5,-3]}'),
        ('{"\\ud800": "a\\ud83d\\ude00\\udc00"}', '{"\ufffd":"a😀\ufffd"}'.encode()),
        ("", b"{}"),
    ],
)
def test_any_input_of_a_call_can_be_told(arguments: str, told: bytes) -> None:
    stream = MessageStream("msg_1", "m", True)
    usage = MessageUsage(1, 0, 0, 1, 0)
    events = [
        *stream.opening_events(usage),
        *stream.feed([CallStarted(0, "call_1", "f"), CallArguments(0, arguments)]),
        *stream.closing_events("length", None, usage),
    ]
    message = whole_message(events)
    assert msgspec.json.encode(message["content"][0]["input"]) == told
    assert message["stop_reason"] == "max_tokens"


def test_an_error_has_anthropics_shape() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json=error_body(Overloaded("too many"), "req_1"))

    with pytest.raises(anthropic.RateLimitError) as raised:
        client_of(answer).messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "q"}]
        )
    assert raised.value.body == {
        "type": "error",
        "error": {
            "type": "rate_limit_error",
            "message": "too many",
            "details": {"error_code": "overloaded"},
        },
        "request_id": "req_1",
    }


def test_a_call_that_its_length_cut_off_has_the_input_that_was_whole() -> None:
    full = '{"a": "x\\"},{", "b": [1, {"c": null}, ["y"], -2.5e3], "": {"d": true, "e": "f"}}'
    for length in range(len(full) + 1):
        found = read_input(full[:length])
        assert list(found) == ["a", "b", ""][: len(found)]
        assert "a" not in found or found["a"] == 'x"},{'
        assert set(found.get("", {})) <= {"d", "e"}
    assert read_input(full) == json.loads(full)
    assert read_input('{"colour": "red", "wh') == {"colour": "red"}
    assert read_input('{"colour": "red"') == {"colour": "red"}
    assert read_input('{"a": [{"b": 1}, {"c": 12') == {"a": [{"b": 1}, {}]}
    cut = whole_message(events_of(CALL[:-20], "length"))
    assert cut["stop_reason"] == "max_tokens"
