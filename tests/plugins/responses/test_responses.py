"""POST /v1/responses through the unchanged SDK: items, streams, chains, what is kept, for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from saccade.core.client import Client
from saccade.core.errors import ImageError, NotFound
from saccade.core.metrics import Metrics
from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.core.types import CacheMiss, CacheMissReason, CacheReport
from saccade.front.conversation import Chat, MessageText
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.sources.source import ImageSource
from saccade.plugins.responses.handlers import cache_diagnostics
from saccade.plugins.responses.options import ResponseOptions
from saccade.plugins.responses.read import read_responses, response_request
from saccade.plugins.responses.store import KEPT_SECONDS, ResponseStore, StoredTurn
from saccade.plugins.responses.write import ResponseStream
from saccade.text.answer.answer_format import FORMATS
from saccade.text.answer.reader import AnswerReader
from saccade.text.grammar.constraint import OutputConstraint
from tests.helpers.asking import eventually
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, serving

CONTEXT = 1 << 20
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
FUNCTION = {
    "type": "function",
    "name": "look",
    "description": "Look closer",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
}


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def image(url: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url or data_url(png()), **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def create(served: Served, given: Any = "Hi", **fields: Any) -> Any:
    return served.openai.responses.create(model="demo", input=given, **fields)


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def refusal(served: Served, given: Any = "Hi", **fields: Any) -> Any:
    """The error of a request that is refused before the engine hears of it."""
    before = len(served.submitted)
    with pytest.raises(openai.APIStatusError) as caught:
        create(served, given, **fields)
    assert len(served.submitted) == before
    return caught.value


# ---- one answer


def test_an_answer_says_all_that_it_was_made_with(served: Served) -> None:
    answer = create(
        served,
        instructions="Be brief.",
        metadata={"a": "b"},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        user="me",
        safety_identifier="x",
        prompt_cache_key="k",
        service_tier="flex",
        max_tool_calls=3,
        truncation="disabled",
        background=False,
        reasoning={"effort": "none", "summary": "auto"},
        text={"verbosity": "medium"},
    )
    assert answer.object == "response" and answer.status == "completed"
    assert answer.output_text == "Hello!" and answer.output[0].status == "completed"
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert (answer.max_output_tokens, answer.temperature, answer.top_p) == (7, 0.5, 0.9)
    assert (answer.user, answer.safety_identifier, answer.prompt_cache_key) == ("me", "x", "k")
    assert answer.service_tier == "default" and answer.reasoning.effort == "none"
    usage = answer.usage
    assert usage.input_tokens_details.cached_tokens == 5 and usage.output_tokens == 3
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    prompt = TOKENIZER.decode(served.submitted[0].tokens)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert served.submitted[0].sampling.max_tokens == 7


def test_a_stream_tells_every_event_in_its_order(served: Served) -> None:
    events = list(create(served, stream=True))
    assert [event.type for event in events] == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello!"
    first, last = events[0].response, events[-1].response
    assert first.status == "in_progress" and first.output == [] and first.usage is None
    assert last.status == "completed" and last.output_text == "Hello!" and last.usage is not None
    assert events[2].item.content == [] and events[2].item.status == "in_progress"
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {last.output[0].id}


def test_the_stream_helper_tells_the_same(served: Served) -> None:
    with served.openai.responses.stream(model="demo", input="Hi") as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "Hello!"


class Point(BaseModel):
    x: int


def test_an_answer_is_parsed_by_the_helpers(served: Served) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode('{"x": 3}')
    found = served.openai.responses.parse(model="demo", input="Hi", text_format=Point)
    assert found.output_parsed == Point(x=3) and served.submitted[0].grammar
    with served.openai.responses.stream(model="demo", input="Hi", text_format=Point) as stream:
        assert stream.get_final_response().output_parsed == Point(x=3)
    create(served, text={"format": {"type": "json_object"}})
    assert served.submitted[-1].grammar not in ("", served.submitted[0].grammar)
    create(served, text={"format": {"type": "text"}})
    assert not served.submitted[-1].grammar


def test_an_answer_that_is_cut_says_so(served: Served) -> None:
    events = list(create(served, stream=True, max_output_tokens=1))
    assert events[-1].type == "response.incomplete"
    for answer in (events[-1].response, create(served, max_output_tokens=1)):
        assert answer.status == "incomplete" and answer.output[0].status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output_text == "Hello"


def test_logprobs_stand_with_their_text(served: Served) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = create(served, **asked).output[0].content[0]
    events = list(create(served, stream=True, **asked))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert "".join(each.token for each in whole.logprobs).startswith("Hello!")
    assert all(len(each.top_logprobs) == 2 for each in whole.logprobs)
    assert [e.logprobs[0].token for e in deltas] == ["Hello", "!"]
    assert create(served).output[0].content[0].logprobs == []
    assert refusal(served, top_logprobs=2).param == "top_logprobs"


# ---- items


def test_items_of_every_kind_become_one_conversation(served: Served) -> None:
    create(
        served,
        [
            {"type": "message", "role": "developer", "content": "Rules."},
            user(text("What is"), image(detail="low"), text("this?")),
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "?"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "A ", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "thing."},
                ],
            },
            user(text("Sure?")),
        ],
    )
    prompt = TOKENIZER.decode(served.submitted[0].tokens)
    assert "system\nRules.<|im_end|>" in prompt and "assistant\nA thing.<|im_end|>" in prompt
    assert len(served.submitted[0].images) == 1 and prompt.endswith("assistant\n")


def asked_of(*items: Any, **fields: Any) -> GenerationRequest:
    """The request that these items are read into."""
    body = bytearray(msgspec.json.encode({"input": list(items), **fields}))
    inquiry = read_responses(body, CONTEXT)
    return response_request(inquiry.request, [], inquiry.items)


def chat_of(ask: GenerationRequest) -> Chat:
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def test_what_the_model_did_in_one_turn_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
    thought = {"type": "reasoning", "summary": [], "content": [reasoned("Hm.")]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": [text("ok"), image("u")]}
    ask = asked_of(user(text("x")), thought, said, call, {**call, "call_id": "c2"}, result)
    _, answer, told = chat_of(ask).messages
    assert answer.content == "Let me." and answer.fields["reasoning_content"] == "Hm."
    assert [each["id"] for each in answer.fields["tool_calls"]] == ["c1", "c2"]
    assert told.role == "tool" and told.place == "input[5].output"
    assert told.content == (
        MessageText("ok", "input[5].output[0]"),
        ImageSource("u", "input[5].output[1]"),
    )


def reasoned(words: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": words}


def test_effort_may_stand_where_chats_have_it() -> None:
    """As Open WebUI 0.12 sends it, which makes a response of a chat (its routers/openai.py, line
    1196) and leaves this name.
    """
    shared: dict[str, Any] = {
        "temperature": 0.1,
        "top_k": 40,
        "min_p": 0.0,
        "seed": 0,
        "max_output_tokens": 64,
    }
    shared["chat_template_kwargs"] = {"enable_thinking": False}
    assert chat_of(asked_of(user(text("x")), reasoning_effort="medium", **shared)).effort == (
        "medium"
    )
    both = {"reasoning": {"effort": "high"}, "reasoning_effort": "low"}
    assert chat_of(asked_of(user(text("x")), **both)).effort == "high"


def test_tools_and_formats_are_read() -> None:
    schema = {"type": "object"}
    ask = asked_of(
        user(text("x")),
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "high"},
    )
    chat = chat_of(ask)
    assert chat.tools is not None
    (tool,) = chat.tools.tools
    assert (tool.name, tool.parameters) == (FUNCTION["name"], FUNCTION["parameters"])
    assert tool.param == "tools[0].parameters"
    assert chat.tools.choice == {"type": "function", "function": {"name": "look"}}
    assert chat.tools.parallel is False and chat.effort == "high"
    assert ask.constraint == OutputConstraint("json", schema, "text.format.schema")


@pytest.mark.first
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "web_search", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}] * 2}, "input[1].id"),  # named twice
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [user(text("x"), {"type": "input_audio"})]}, "input[0].content[1].type"),
        ({"input": [user(text("x"), {"type": "input_image"})]}, "input[0].content[1].file_id"),
    ],
)
def test_what_is_refused_is_named_as_the_client_wrote_it(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    error = refusal(served, fields.get("input", "Hi"), **without(fields, "input"))
    assert error.param == param, error.message
    assert error.status_code == (404 if (error.code or "").endswith("not_found") else 400)


def test_an_image_that_cannot_be_read_is_named_where_it_stands(served: Served) -> None:
    bad = image("data:image/png;base64,aGFsbG8=")
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [text("see"), bad]}
    assert refusal(served, [user(text("x"), bad)]).param == "input[0].content[1]"
    assert refusal(served, [user(text("x")), call, result]).param == "input[2].output[1]"
    assert refusal(served, "a" * 20_000).param == "input"


# ---- chains


def test_a_chain_is_the_conversation_token_for_token(served: Served) -> None:
    first = create(served, [user(text("One"), image())])
    second = create(served, "Two", previous_response_id=first.id, instructions="New.")
    third = create(served, [user(text("Three"))], previous_response_id=second.id)
    one, two, three = served.submitted
    assert three.tokens[: len(one.tokens)] == one.tokens  # and so all of it is in the cache
    prompt = TOKENIZER.decode(three.tokens)
    assert prompt.count("assistant\nHello!<|im_end|>") == 2 and "New." not in prompt
    assert [each.key for each in three.images] == [one.images[0].key]
    assert "New." in TOKENIZER.decode(two.tokens)
    assert third.previous_response_id == second.id


def test_a_streamed_response_is_kept_as_any(served: Served) -> None:
    events = list(create(served, stream=True))
    kept = served.openai.responses.retrieve(events[-1].response.id)
    assert kept == events[-1].response
    create(served, "And?", previous_response_id=kept.id)
    assert TOKENIZER.decode(served.submitted[1].tokens).count("Hello!") == 1


def test_the_cache_is_diagnosed_in_openais_words(served: Served) -> None:
    seen = [user(image(data_url(png())), text("one"), text("two"))]
    first = create(served, seen)
    assert first.prompt_cache_diagnostics is None
    compare = {"prompt_cache_options": {"comparison_response_id": first.id}}
    assert create(served, seen, **compare).prompt_cache_diagnostics.type == "cache_hit"
    prompt = len(served.submitted[-1].tokens)
    reports: list[tuple[CacheMissReason, int, dict[str, Any]]] = [
        ("prompt_changed", 11, {"type": "cache_miss", "reason": "input_changed"}),
        ("other_settings", 9, {"type": "cache_miss", "reason": "input_changed"}),
        ("evicted", 9, {"type": "unavailable"}),
    ]
    for reason, token, told in reports:
        missed = CacheMiss(reason, token, prompt - token)
        served.engine.caching = CacheReport(missed=missed)
        found = create(served, seen, extra_body={"prompt_cache_diagnostics": True})
        diagnosed = found.prompt_cache_diagnostics.model_dump()
        assert told.items() <= diagnosed.items() and diagnosed["saccade_reason"] == reason
        assert diagnosed["saccade_place"].startswith("input[0].content[")
        if told["type"] == "cache_miss":
            assert diagnosed["cache_missed_tokens"] == prompt - token
            assert diagnosed["comparison_reusable_tokens"] == token
    *_, last = create(served, seen, stream=True, **compare)
    assert last.response.prompt_cache_diagnostics.type == "unavailable"
    kept = served.openai.responses.retrieve(last.response.id)
    assert kept.prompt_cache_diagnostics == last.response.prompt_cache_diagnostics
    gone = {"prompt_cache_options": {"comparison_response_id": "resp_0"}}
    lacking = create(served, seen, **gone).prompt_cache_diagnostics
    assert lacking.type == "comparison_response_not_found"


def test_tools_that_changed_are_named_as_such() -> None:
    told = cache_diagnostics(CacheMiss("prompt_changed", 3, 40, "tools"))
    assert (told["reason"], told["cache_missed_tokens"]) == ("tools_changed", 40)


def test_input_is_counted_as_it_would_be_asked(served: Served) -> None:
    first = create(served, [user(text("One"), image())])
    fields: dict[str, Any] = {"input": "Two", "previous_response_id": first.id}
    counted = served.openai.responses.input_tokens.count(model="demo", **fields)
    assert len(served.submitted) == 1
    assert (
        counted.input_tokens
        == create(served, "Two", previous_response_id=first.id).usage.input_tokens
    )


def test_what_is_not_to_be_kept_is_not(served: Served) -> None:
    answer = create(served, store=False)
    assert served.front.metrics.value("saccade_stored_responses") == kept_count(served)
    error = refusal(served, previous_response_id=answer.id)
    assert error.status_code == 404 and error.code == "response_not_found"
    assert error.message.count("store=false")
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(answer.id)


def kept_count(served: Served) -> float:
    return served.front.metrics.value("saccade_stored_responses")


def test_input_items_come_in_pages(served: Served) -> None:
    first = create(served, [user(text("One"), image())])
    second = create(served, "Two", previous_response_id=first.id)
    listing = served.openai.responses.input_items.list
    items = list(listing(second.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].content[1].image_url.startswith("data:image/png")
    assert items[1].id == first.output[0].id and items[2].content[0].text == "Two"
    assert [item.id for item in listing(second.id)] == [item.id for item in reversed(items)]
    page = listing(second.id, limit=2, order="asc")
    assert page.has_more and [item.id for item in page] == [item.id for item in items]
    with pytest.raises(openai.BadRequestError):
        listing(second.id, limit=101)


def test_an_item_may_be_named_by_its_id(served: Served) -> None:
    first = create(served, [user(text("One"), image())])
    items = list(served.openai.responses.input_items.list(first.id))
    names = (items[0].id, first.output[0].id)
    references = [{"type": "item_reference", "id": each} for each in names]
    create(served, [*references, user(text("Two"))])
    by_chain = create(served, "Two", previous_response_id=first.id)
    assert by_chain.output_text == "Hello!"
    assert served.submitted[1].tokens == served.submitted[2].tokens


def test_a_deleted_response_is_gone_but_not_what_followed(served: Served) -> None:
    first = create(served, "One")
    second = create(served, "Two", previous_response_id=first.id)
    served.openai.responses.delete(first.id)
    for ask in (served.openai.responses.retrieve, served.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    create(served, "Three", previous_response_id=second.id)
    assert "One" in TOKENIZER.decode(served.submitted[-1].tokens)


def test_a_stream_is_cancelled_by_its_id(served: Served) -> None:
    served.engine.paused = True
    try:
        stream = create(served, stream=True)
        started = next(iter(stream)).response
        assert served.openai.responses.retrieve(started.id).status == "in_progress"
        cancelled = served.openai.responses.cancel(started.id)
        events = list(stream)
    finally:
        served.engine.paused = False
    assert cancelled.status == "cancelled" and cancelled.id == started.id
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled"
    assert served.engine.aborted == [served.submitted[0].id]
    assert served.openai.responses.retrieve(started.id).status == "cancelled"
    assert served.openai.responses.cancel(started.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.cancel("resp_none")
    eventually(lambda: served.front.metrics.value("saccade_requests_in_flight") == 0)


def test_a_client_that_leaves_stops_its_response(served: Served) -> None:
    served.engine.paused = True
    try:
        stream = create(served, stream=True)
        name = next(iter(stream)).response.id
        stream.close()
        eventually(lambda: len(served.engine.aborted) == 1)
    finally:
        served.engine.paused = False
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(name)


# ---- tools and reasoning, as the answer is read


def told(answer: str, finish: Any = "stop") -> tuple[list[Any], dict[str, Any]]:
    """The events of an answer that came letter by letter, and the response."""
    tools = {"look": FUNCTION["parameters"]}
    reader = AnswerReader("either", FORMATS["hermes"], tools, make_id=lambda: "call_1")
    response: dict[str, Any] = {"id": "resp_1", "status": "in_progress", "output": []}
    stream = ResponseStream(response)
    events = stream.opening_events()
    for letter in answer:
        events += stream.feed(reader.feed(letter))
    events += stream.feed(reader.end())
    events += stream.closing_events(finish, {})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [event["type"].removeprefix("response.") for event in events], response


def test_thoughts_words_and_calls_are_items_in_their_order() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>'
    names, response = told(f"<think>Hm.</think>Let me.\n{call}")
    thought, said, called = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"].strip() == "Let me."
    assert called["call_id"] == "call_1" and called["name"] == "look"
    assert msgspec.json.decode(called["arguments"]) == {"where": "left"}
    order = [name for i, name in enumerate(names) if not i or name != names[i - 1]]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    names, response = told("")
    assert response["output"][0]["content"][0]["text"] == "" and names[-1] == "completed"


def test_an_answer_that_fails_on_its_way_says_why() -> None:
    response: dict[str, Any] = {"id": "resp_1", "status": "in_progress", "output": []}
    stream = ResponseStream(response)
    stream.opening_events()
    stream.feed(AnswerReader(None, None, {}).feed("He"))
    events = stream.fail(ImageError("it is damaged", "input[0].content[0]"))
    assert events[-1]["type"] == "response.failed" and events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["error"]["code"] == "invalid_image"


# ---- what is kept


def turn(size: int, before: StoredTurn | None = None, name: str = "i") -> StoredTurn:
    return StoredTurn(((name, b"x" * size),), (), before)


def store(
    clock: Any = lambda: 0.0, most: int = 10_000, **options: Any
) -> tuple[ResponseStore, Metrics]:
    metrics = Metrics()
    return ResponseStore(ResponseOptions(**options), metrics, clock, most), metrics


ANNA, BEN = Client("anna", limited=True), Client("ben", limited=True)
ALONE = Client()


def holds(kept: ResponseStore, client: Client, name: str) -> bool:
    try:
        return kept.find(client, name, "id").id == name
    except NotFound:
        return False


def test_the_response_used_least_lately_goes_first() -> None:
    kept, metrics = store(responses_mb=1)
    for name in "abc":
        kept.keep(ALONE, name, b"{}", turn(300_000))
    assert holds(kept, ALONE, "a")
    kept.keep(ALONE, "d", b"{}", turn(300_000))
    assert [name for name in "abcd" if holds(kept, ALONE, name)] == ["a", "c", "d"]
    assert metrics.value("saccade_stored_responses") == 3
    assert 900_000 < metrics.value("saccade_stored_responses_bytes") <= 1 << 20


def test_a_turn_is_kept_once_and_until_the_last_that_continues_it_goes() -> None:
    kept, _ = store(responses_mb=1)
    first = turn(400_000, name="one")
    kept.keep(ALONE, "a", b"{}", first)
    kept.keep(ALONE, "b", b"{}", turn(10, first, "two"))
    kept.keep(ALONE, "c", b"{}", turn(10, first, "three"))
    assert kept.nbytes < 500_000
    kept.delete(ALONE, "a", "id")
    assert kept.nbytes > 400_000 and kept.item(ALONE, "one", "id").startswith(b"x")
    kept.delete(ALONE, "b", "id")
    kept.delete(ALONE, "c", "id")
    assert kept.nbytes == 0
    with pytest.raises(NotFound):
        kept.item(ALONE, "one", "id")
    kept.keep(ALONE, "d", b"{}", turn(10, first, "four"))  # it began before all of these went
    assert kept.nbytes > 400_000
    kept.delete(ALONE, "d", "id")
    assert kept.nbytes == 0


def test_a_response_is_kept_for_a_time_after_its_last_use() -> None:
    now = [0.0]
    kept, metrics = store(lambda: now[0] * KEPT_SECONDS / 10.0)
    kept.keep(ALONE, "a", b"{}", turn(10))
    kept.keep(ALONE, "b", b"{}", turn(10))
    now[0] = 9.0
    assert holds(kept, ALONE, "a")
    now[0] = 18.0
    assert holds(kept, ALONE, "a") and not holds(kept, ALONE, "b")
    now[0] = 28.0
    assert not holds(kept, ALONE, "a")
    assert kept.nbytes == 0 and metrics.value("saccade_stored_responses") == 0


def test_one_of_several_keys_has_half_of_the_room_and_its_own_only() -> None:
    kept, _ = store(responses_mb=1, most=6)
    kept.keep(BEN, "b", b"{}", turn(100_000))
    for i in range(8):
        kept.keep(ANNA, f"a{i}", b"{}", turn(100_000))
    assert holds(kept, BEN, "b") and not holds(kept, BEN, "a7") and not holds(kept, ANNA, "b")
    assert [i for i in range(8) if holds(kept, ANNA, f"a{i}")] == [5, 6, 7]
    assert not kept.fits(ANNA, 600_000) and kept.fits(ALONE, 600_000)
    kept.keep(ANNA, "huge", b"{}", turn(600_000))
    assert not holds(kept, ANNA, "huge") and holds(kept, BEN, "b")


def test_nothing_is_kept_without_room(served: Served) -> None:
    kept, _ = store(responses_mb=0)
    assert not kept.fits(ALONE, 1)
    kept.keep(ALONE, "a", b"{}", turn(1))
    assert not holds(kept, ALONE, "a") and kept.nbytes == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("anna:key-a\nben:key-b\n")
    options = ServerOptions(port=0, served_model_name=("demo",))
    with serving(options, extras=(KeySettings(str(path)),)) as served:
        yield served


def test_no_key_reads_or_continues_or_stops_anothers_response(shared: Served) -> None:
    anna, ben = (
        openai.OpenAI(base_url=f"{shared.address}/v1", api_key=key, max_retries=0)
        for key in ("key-a", "key-b")
    )
    mine: Any = anna.responses.create(model="demo", input="secret")
    assert anna.responses.retrieve(mine.id).id == mine.id
    again: Any = {"model": "demo", "input": [{"type": "item_reference", "id": mine.output[0].id}]}
    shared.engine.paused = True
    stream = anna.responses.create(model="demo", input="x", stream=True)
    running: Any = next(iter(stream))
    attempts = [
        lambda: ben.responses.retrieve(mine.id),
        lambda: ben.responses.input_items.list(mine.id),
        lambda: ben.responses.delete(mine.id),
        lambda: ben.responses.create(model="demo", input="x", previous_response_id=mine.id),
        lambda: ben.responses.create(**again),
        lambda: ben.responses.retrieve(running.response.id),
        lambda: ben.responses.cancel(running.response.id),
    ]
    try:
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert shared.engine.aborted == []
    finally:
        shared.engine.paused = False
    assert list(stream)[-1].type == "response.completed"
    anna.responses.create(**again)
    anna.close()
    ben.close()


def test_many_chains_at_a_time_stay_apart(served: Served) -> None:
    def chain(name: str) -> None:
        last = create(served, f"{name} 0")
        for turn_number in range(1, 4):
            last = create(served, f"{name} {turn_number}", previous_response_id=last.id)

    threads = [threading.Thread(target=chain, args=(name,)) for name in ("ann", "bob", "cyd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    longest = [TOKENIZER.decode(each.tokens) for each in served.submitted]
    whole = [prompt for prompt in longest if prompt.count("user\n") == 4]
    assert len(whole) == 3
    for prompt in whole:
        assert sum(name in prompt for name in ("ann", "bob", "cyd")) == 1
