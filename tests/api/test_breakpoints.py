"""Marks on parts, messages, tools and requests become places in the prompt's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from saccade.core.types import Caching
from tests.helpers.images import data_url
from tests.helpers.served import TOKENIZER, Served
from tests.media.pictures import encode, noise

IMAGE = data_url(encode(noise(40, 40)))
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 4}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def caching(served: Served) -> tuple[Caching, list[str]]:
    """What the engine was asked, and the prompt's text up to each breakpoint."""
    (request,) = served.submitted
    served.engine.received.clear()
    points = request.caching.breakpoints
    return request.caching, [TOKENIZER.decode(request.tokens[:at]) for at, _ in points]


def chat(served: Served, messages: list[dict[str, Any]], **more: Any) -> Any:
    answer = served.http.post("/v1/chat/completions", json={**ASK, "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_marks_end_where_their_parts_end_in_the_rendered_prompt(served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [text("Answer in one word.  ", **HOUR)]},
        {"role": "user", "content": [text("First"), {**image, **POINT}, text("what is it?")]},
        {"role": "assistant", "content": "A cat.", **HOUR},
        {"role": "user", "content": [text("Sure?\n\n", cache_control={"type": "ephemeral"})]},
    ]
    chat(served, messages)
    asked, prefixes = caching(served)
    assert [seconds for _, seconds in asked.breakpoints] == [3600, 1800, 3600, 300]
    assert prefixes[0].endswith("Answer in one word.")
    after = TOKENIZER.decode(TOKENIZER.encode(prefixes[1])[-4:])
    assert "First" in prefixes[1] and "what" not in prefixes[1] and "image" in after
    assert prefixes[2].endswith("A cat.") and prefixes[3].endswith("Sure?")


@pytest.mark.parametrize(
    ("field", "seconds"),
    [
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "12h"}}, 43_200),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({"prompt_cache_key": "agent 7"}, None),
    ],
)
def test_a_request_keeps_its_whole_prompt(
    served: Served, field: dict[str, Any], seconds: int | None
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Once upon a time"}),
    ):
        assert served.http.post(path, json={**ASK, **body, **field}).status_code == 200
        (request,) = served.submitted
        served.engine.received.clear()
        expected = () if seconds is None else ((len(request.tokens), seconds),)
        assert request.caching.breakpoints == expected
        assert request.caching.family == field.get("prompt_cache_key", "")
        assert request.cache_salt == ""  # the key of a prompt decides nothing about who shares it


def test_four_of_anthropics_marks_are_the_most_and_of_openais_the_last_four_count(
    served: Served,
) -> None:
    messages = [{"role": "user", "content": [text(f"part {i} ", **HOUR) for i in range(5)]}]
    refused = served.http.post("/v1/chat/completions", json={**ASK, "messages": messages})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "messages[0].content[4].cache_control"
    assert "at most 4" in error["message"]
    messages = [{"role": "user", "content": [text(f"part {i} ", **POINT) for i in range(6)]}]
    chat(served, messages)
    _, prefixes = caching(served)
    assert [prefix[-6:] for prefix in prefixes] == [f"part {i}" for i in range(2, 6)]


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "25h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": "0m"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2w"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": ""}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": "9" * 5000 + "s"}}, "cache_control.ttl"),
        ({"prompt_cache_breakpoint": {"ttl": "soon"}}, "prompt_cache_breakpoint.ttl"),
    ],
)
def test_a_mark_that_is_none_is_refused_by_name(
    served: Served, mark: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": [text("Hi", **mark)]}]
    refused = served.http.post("/v1/chat/completions", json={**ASK, "messages": messages})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == f"messages[0].content[0].{param}"
    if param.endswith("ttl"):
        assert 'expected a time from "1s" to "24h"' in error["message"]


def test_diagnostics_name_parts_in_the_clients_words(served: Served) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("One."), text("Two.")]},
    ]
    body = chat(served, messages, prompt_cache_diagnostics=True)
    assert body["diagnostics"] == {"cache_miss_reason": None}
    assert body["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0
    asked, _ = caching(served)
    assert asked.diagnose and "diagnostics" not in chat(served, messages)
    asking = {"messages": messages, "prompt_cache_diagnostics": {}, "stream": True}
    lines = served.http.post("/v1/chat/completions", json={**ASK, **asking}).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["diagnostics"] == body["diagnostics"]
    assert not any("diagnostics" in line for line in lines[:-3])


def test_the_sdk_sends_marks_and_reads_what_they_wrote(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": [text("Hi", **POINT)]}],
        prompt_cache_retention="24h",
        prompt_cache_key="k",
    )
    assert answer.usage.prompt_tokens_details.image_tokens == 0
    assert caching(served)[0].family == "k"


def test_anthropics_marks_become_the_same_and_usage_tells_by_lifetime(served: Served) -> None:
    body = {
        "model": "demo",
        "max_tokens": 4,
        "system": [text("Be brief.", **HOUR)],
        "messages": [{"role": "user", "content": [text("Hi"), text("there")]}],
        "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": None},
    }
    answer = served.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    asked, prefixes = caching(served)
    assert [seconds for _, seconds in asked.breakpoints] == [3600, 300] and asked.diagnose
    assert prefixes[0].endswith("Be brief.") and prefixes[1].endswith("Hithere")
    usage = answer.json()["usage"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": 0,
    }
    assert answer.json()["diagnostics"] == {"cache_miss_reason": None}
