"""POST /v1/messages and its count of tokens: the unchanged anthropic SDK against a server."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest

from saccade.core.options import ServerOptions
from saccade.families.qwen_vl.spec import TEMPLATES
from saccade.text.answer.answer_format import FORMATS, AnswerFormat
from saccade.text.answer.reasoning import THINK
from saccade.text.prompt.template import ChatTemplate
from saccade_bench.attacks import raw
from tests.helpers.echo import CACHED, CONTEXT
from tests.helpers.images import png
from tests.helpers.served import FOLDER, TOKENIZER, Served, serving

TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look closer.",
    "input_schema": {
        "type": "object",
        "properties": {"where": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["where"],
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "ä \\"b\\"", "n": 3}}\n</tool_call>'
HI: Any = [{"role": "user", "content": "Hi"}]
MOST: Any = {"model": "demo", "max_tokens": 50}


def shown(data: bytes, **more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source, **more}


def test_a_message_is_answered(claude: Any, served: Served) -> None:
    message = claude.messages.create(**MOST, messages=HI, system="Be kind.")
    (request,) = served.submitted
    assert message.content[0].to_dict() == {"type": "text", "text": "Hello!"}
    assert (message.role, message.model, message.type) == ("assistant", "demo", "message")
    assert message.id.startswith("msg_") and message._request_id
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens == len(request.tokens) - CACHED
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (CACHED, 0)
    assert usage.output_tokens == len(TOKENIZER.encode("Hello!")) + 1


def test_a_stream_says_what_the_whole_says(claude: Any, served: Served) -> None:
    served.says("Hello, 世界!")
    whole = claude.messages.create(**MOST, messages=HI)
    with claude.messages.stream(**MOST, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello, 世界!"
    skip = {"id"}
    told = final.model_dump(exclude={"content": {"__all__": {"parsed_output"}}, "id": True})
    assert told == whole.model_dump(exclude=skip)


def test_the_raw_events_come_in_order(claude: Any) -> None:
    kinds = [event.type for event in claude.messages.create(**MOST, messages=HI, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the SDK leaves pings out
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_an_answer_says_what_ended_it(claude: Any, served: Served) -> None:
    served.says("one two three")
    asked = {**MOST, "messages": HI}
    stopped = claude.messages.create(**asked, stop_sequences=["never", "e t"])
    assert stopped.content[0].text == "on"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "e t")
    with claude.messages.stream(**asked, stop_sequences=["thr", "ee"]) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == "one two "
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "thr")
    short = claude.messages.create(**{**asked, "max_tokens": 2})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    served.engine.reply = lambda request: TOKENIZER.encode("x") * CONTEXT
    long = claude.messages.create(**{**asked, "max_tokens": 9 * CONTEXT})
    assert long.stop_reason == "model_context_window_exceeded"


def test_a_prompt_may_be_computed_for_later(claude: Any, served: Served) -> None:
    message = claude.messages.create(model="demo", max_tokens=0, messages=HI)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    assert served.submitted[0].sampling.max_tokens == 1


def test_images_come_as_bytes_and_as_files(claude: Any, served: Served) -> None:
    data = png()
    file = claude.beta.files.upload(file=("a.png", data, "image/png"))
    told = (file.type, file.filename, file.mime_type, file.size_bytes)
    assert told == ("file", "a.png", "image/png", len(data))
    by_id = {"type": "image", "source": {"type": "file", "file_id": file.id}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [shown(data)]}
    content = [shown(data), by_id, {"type": "text", "text": "Same?"}]
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    claude.messages.create(
        **MOST,
        system=[{"type": "text", "text": "s"}],
        messages=[
            {"role": "user", "content": content},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    )
    (request,) = served.submitted
    assert len(request.spans) == 3 and len({image.key for image in request.images}) == 1
    claude.beta.files.delete(file.id)


def test_a_document_of_text_is_text(claude: Any, served: Served) -> None:
    def tokens(block: Any) -> tuple[int, ...]:
        served.engine.received.clear()
        claude.messages.create(**MOST, messages=[{"role": "user", "content": [block]}])
        tokens: tuple[int, ...] = served.submitted[0].tokens
        return tokens

    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    document = {"type": "document", "title": "A tale", "source": source}
    assert tokens(document) == tokens({"type": "text", "text": "A tale\nOnce."})
    parts = {"type": "content", "content": [{"type": "text", "text": "Once."}, shown(png())]}
    assert len(tokens({"type": "document", "source": parts})) > len(tokens(document))


def test_what_is_counted_is_what_is_sent(claude: Any, served: Served) -> None:
    asked = {
        "model": "demo",
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [shown(png("blue", (100, 100))), {"type": "text", "text": "?"}],
            }
        ],
    }
    served.engine.received.clear()
    decoded = served.front.metrics.value("saccade_images_decoded_total")
    count = claude.messages.count_tokens(**asked)
    assert served.engine.received == []
    assert served.front.metrics.value("saccade_images_decoded_total") == decoded
    claude.messages.create(**asked, max_tokens=1)
    assert count.input_tokens == len(served.submitted[0].tokens)


def test_who_writes_a_marker_of_anthropics_accounts_keeps_the_prefix(
    claude: Any, served: Served
) -> None:
    """Claude Code sends another one with every request."""
    for fingerprint in ("a", "b"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={fingerprint};"}
        kind = {"type": "text", "text": "Be kind."}
        claude.messages.create(**MOST, messages=HI, system=[billing, kind])
    first, second = served.submitted
    assert first.tokens == second.tokens


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"speed": "fast"}, "speed"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    claude: Any, fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**{**MOST, "messages": HI}, extra_body=fields)
    assert place in refused.value.body["error"]["message"]  # type: ignore[index]
    assert refused.value.type == "invalid_request_error"


def test_a_harmless_field_is_accepted(claude: Any) -> None:
    thinking = {"type": "clear_thinking_20251015", "keep": "all"}
    neutral = {
        "betas": ["x"],
        "container": None,
        "context_management": {"edits": [thinking]},
        "mcp_servers": [],
        "output_config": {"effort": "low"},
        "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "top_k": 0,
        "top_p": 1.0,
    }
    message = claude.beta.messages.create(
        **MOST,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}], "id": 3}],
        service_tier="auto",
        metadata={"user_id": "u", "more": 1},
        extra_body=neutral,
        betas=["context-management-2025-06-27"],
        extra_headers={"anthropic-version": "2199-01-01"},
    )
    assert message.content[0].text == "Hello!"


def test_an_image_that_cannot_be_read_is_named_as_the_client_has_it(claude: Any) -> None:
    junk = {"type": "tool_result", "tool_use_id": "t", "content": [shown(b"junk" * 9)]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(
            **MOST,
            system="s",
            messages=[
                *HI,
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": [{"type": "text", "text": "b"}, junk]},
            ],
        )
    assert "messages[2].content[1].content[0]" in str(refused.value)


def test_a_prompt_beyond_the_context_is_refused_as_clients_know_it(claude: Any) -> None:
    long = [{"role": "user", "content": "word " * CONTEXT}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(**MOST, messages=long)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.count_tokens(model="demo", messages=long)


def test_a_stream_that_is_closed_ends_the_work(claude: Any, served: Served) -> None:
    served.engine.paused = True
    try:
        with claude.messages.create(**MOST, messages=HI, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(anthropic.APITimeoutError):
            claude.with_options(timeout=0.3).messages.create(**MOST, messages=HI)
        for _ in range(100):
            if len(served.engine.aborted) == 2:
                break
            served.http.get("/health")
    finally:
        served.engine.paused = False
    assert len(served.engine.aborted) == 2


def test_the_async_client(served: Served) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(
            api_key="any", base_url=served.address, max_retries=0
        ) as client:
            one = client.messages.create(**MOST, messages=HI)
            async with client.messages.stream(**MOST, messages=HI) as stream:
                text = await stream.get_final_text()
            return [(await one).content[0].text, text]

    assert asyncio.run(ask()) == ["Hello!", "Hello!"]


# ---- tools and reasoning


@pytest.fixture(scope="module")
def able() -> Iterator[Served]:
    """A model that reasons, unless told not to, and calls."""
    plain, calling = ChatTemplate.load(FOLDER, TOKENIZER, None, TEMPLATES).sources
    off = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    sources = {"default": plain + off, "tool_use": calling + off}
    template = ChatTemplate(sources, TOKENIZER.named_tokens, shows_calls=False)
    with serving(
        answer_format=AnswerFormat(FORMATS["hermes"], THINK), context=4096, template=template
    ) as served:
        yield served


@pytest.fixture
def claude_able(able: Served) -> Iterator[Any]:
    able.engine.received.clear()
    with anthropic.Anthropic(
        api_key="any", base_url=able.address, max_retries=0, timeout=30
    ) as client:
        yield client


def test_calls_and_reasoning_are_blocks(claude_able: Any, able: Served) -> None:
    able.says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    asked = {**MOST, "max_tokens": 400, "messages": HI, "tools": [TOOL]}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = claude_able.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    thinking, text, one, other = whole.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm.")
    assert thinking.signature and text.text.strip() == "I look."
    assert one.name == other.name == "look" and one.id != other.id
    assert one.input == other.input == {"where": 'ä "b"', "n": 3}
    with claude_able.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    skip = {"id": True, "parsed_output": True}
    told = [block.model_dump(exclude=skip) for block in final.content]
    assert told == [block.model_dump(exclude=skip) for block in whole.content]
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert final.stop_reason == "tool_use" and final.usage == whole.usage
    hidden = claude_able.messages.create(**asked | {"thinking": HIDDEN})
    assert (hidden.content[0].type, hidden.content[0].thinking) == ("thinking", "")


HIDDEN = {"type": "adaptive", "display": "omitted"}


def test_an_answer_goes_back_as_it_came(claude_able: Any, able: Served) -> None:
    able.says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    asked = {**MOST, "max_tokens": 400, "tools": [TOOL]}
    message = claude_able.messages.create(**asked, messages=HI)
    (use,) = (block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [shown(png())]}
    more = [*HI, message.to_param(), {"role": "user", "content": [result]}]
    count = claude_able.messages.count_tokens(model="demo", messages=more, tools=[TOOL])
    claude_able.messages.create(**asked, messages=more)
    request = able.submitted[-1]
    assert count.input_tokens == len(request.tokens) and len(request.spans) == 1
    shown_again = able.prompt
    assert "I look." in shown_again and "<tool_call>" in shown_again
    assert shown_again.index("Look closer.") < shown_again.index("<tool_call>")


def test_thinking_may_be_switched_off(claude_able: Any, able: Served) -> None:
    able.says("Hello!")
    off = claude_able.messages.create(**MOST, messages=HI, thinking={"type": "disabled"})
    assert able.prompt.endswith("<think>\n\n</think>\n\n")
    assert [block.type for block in off.content] == ["text"]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "look"}, True),
    ],
)
def test_a_choice_may_force_a_call(
    claude_able: Any, able: Served, choice: dict[str, Any], forced: bool
) -> None:
    able.says(f"<think></think>\n\n{CALL}")
    claude_able.messages.create(
        **{**MOST, "max_tokens": 300}, messages=HI, tools=[TOOL], tool_choice=choice
    )
    assert bool(able.submitted[-1].grammar) == forced


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        (
            {
                "tools": [{**TOOL, "input_schema": {"type": 3}}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_a_tool_or_schema_that_will_not_do_is_named_as_the_client_has_it(
    claude_able: Any, fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude_able.messages.create(**MOST, messages=HI, extra_body=fields)
    assert place in refused.value.body["error"]["message"]  # type: ignore[index]


class Sighting(pydantic.BaseModel):
    """What an answer is to be."""

    what: str
    count: int


def test_an_answer_is_parsed(claude_able: Any, able: Served) -> None:
    able.says('<think></think>\n\n{"what": "cat", "count": 2}')
    parsed = claude_able.messages.parse(**MOST, messages=HI, output_format=Sighting)
    assert parsed.parsed_output == Sighting(what="cat", count=2)
    assert '"count"' in able.submitted[-1].grammar


def test_the_tool_runner_runs_a_tool_and_shows_its_image(claude_able: Any, able: Served) -> None:
    seen: list[str] = []

    @anthropic.beta_tool
    def look(where: str, n: int = 1) -> Any:
        """Look closer.

        Args:
            where: The place.
            n: How often.
        """
        seen.append(where)
        return [shown(png())]

    def reply(request: Any) -> list[int]:
        return TOKENIZER.encode(f"<think></think>\n\n{'A cat.' if request.images else CALL}")

    able.engine.reply = reply
    runner = claude_able.beta.messages.tool_runner(
        **{**MOST, "max_tokens": 300}, messages=HI, tools=[look]
    )
    assert runner.until_done().content[-1].text.strip() == "A cat."
    assert seen == ['ä "b"'] and len(able.submitted[-1].images) == 1


def test_a_forced_call_that_its_length_cuts_off_is_told(able: Served, claude_able: Any) -> None:
    """The whole message has what was whole, as the SDK reads the stream."""
    cut = TOKENIZER.encode('<tool_call>\n{"name": "look", "arguments": {"where": "here", "n')
    able.engine.reply = lambda request: [*cut, *cut]
    choice = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}
    asked = {"model": "demo", "max_tokens": len(cut), "messages": HI, **choice}
    told = claude_able.messages.create(**asked)
    with claude_able.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (told, streamed):
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.input == {"where": "here"} and message.stop_reason == "max_tokens"


# ---- errors that are made before a handler, and after one has begun


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """A server with a key and little room."""
    options = ServerOptions(
        port=0,
        served_model_name=("demo",),
        api_key="right",
        max_body_mb=1,
        max_queued_requests=1,
    )
    with serving(options) as served:
        yield served


def client_with(served: Served, **how: Any) -> Any:
    return anthropic.Anthropic(base_url=served.address, max_retries=0, timeout=30, **how)


def refused(error: Any, kind: str) -> None:
    """The shape of an error, whoever made it."""
    assert error.body["type"] == "error" and error.body["error"]["type"] == kind
    assert error.body["error"]["message"]
    assert error.body["request_id"] == error.request_id is not None


def test_either_key_opens_and_a_wrong_one_is_told_so(narrow: Served) -> None:
    for how in ({"api_key": "right"}, {"auth_token": "right"}):
        with client_with(narrow, **how) as client:
            assert client.messages.create(**MOST, messages=HI).content[0].text == "Hello!"
    with client_with(narrow, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as error:
            client.messages.create(**MOST, messages=HI)
        refused(error.value, "authentication_error")


def test_statuses_and_types_of_errors(narrow: Served) -> None:
    with client_with(narrow, api_key="right") as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="claude", max_tokens=1, messages=HI)
        refused(missing.value, "not_found_error")
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            client.messages.create(**MOST, messages=[{"role": "user", "content": "x" * 2**21}])
        refused(large.value, "request_too_large")
        with pytest.raises(anthropic.NotFoundError) as nowhere:
            client.messages.batches.list()
        refused(nowhere.value, "not_found_error")
        narrow.engine.paused = True
        with client.messages.create(**MOST, messages=HI, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError) as full:
                client.messages.create(**MOST, messages=HI)
        narrow.engine.paused = False
    refused(full.value, "rate_limit_error")
    assert full.value.response.headers["retry-after"] == "1"
    key = {"x-api-key": "right"}
    wrong = narrow.http.get("/v1/messages", headers=key)
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"
    assert narrow.http.get("/v1/nothing", headers=key).json()["error"]["code"] == "not_found"


def test_what_the_connection_itself_refuses_has_the_same_shape(narrow: Served) -> None:
    headers = b"".join(b"x-%d: y\r\n" % i for i in range(200))
    for path, shape in ((b"/v1/messages?beta=true", "type"), (b"/v1/completions", "error")):
        answer = raw.ask(narrow.address, b"POST %b HTTP/1.1\r\n%b\r\n" % (path, headers))
        told = json.loads(answer.body)
        assert answer.status == 431 and next(iter(told)) == shape
        kind = told["error"]["type"]
        assert kind == "invalid_request_error" and "headers" in told["error"]["message"]
