"""/flush_cache and /reset_prefix_cache on a real server: what was seen costs its work again, and a
stream that runs goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server
from tests.e2e.ways import WAYS, WITH_KEY, perhaps_routed
from tests.fixtures.tiny import picture
from tests.helpers.images import content, image_part, text_part, user

pytestmark = pytest.mark.more

ENCODED, DECODED = "saccade_images_encoded_total", "saccade_images_decoded_total"


@pytest.fixture(scope="module", params=WAYS)
def server(
    tiny: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with perhaps_routed(tiny, request.param, tmp_path_factory.mktemp("log")) as server:
        yield server


def body(seed: int, **fields: Any) -> dict[str, Any]:
    parts = (image_part(picture(90, 120, seed=seed)), text_part("what is there? " * 8))
    settings = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"messages": [user(*parts)], **settings, **fields}


def ask(server: Server, salt: str) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt were cached."""
    answer = server.post("/v1/chat/completions", body(1, cache_salt=salt))
    return content(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("path", "work"), [("/flush_cache", 2), ("/reset_prefix_cache", 1)])
def test_what_was_seen_costs_its_work_again(server: Server, path: str, work: int) -> None:
    encoded, decoded = server.metric(ENCODED), server.metric(DECODED)
    first, cold = ask(server, path)
    again, warm = ask(server, path)
    assert cold == 0 < warm
    assert server.metric(ENCODED) == encoded + 1
    server.post(path)
    late, flushed = ask(server, path)
    assert flushed == 0 and first == again == late
    assert server.metric(ENCODED) == encoded + work
    assert server.metric(DECODED) == decoded + work, "pixels are kept with the embeddings"


def test_a_stream_goes_on_unharmed(server: Server) -> None:
    fields = {"max_tokens": 200, "stream": True}
    url = f"{server.url}/v1/chat/completions"

    def stream(disturb: bool) -> list[str]:
        texts = []
        sent = httpx.stream("POST", url, json=body(9, **fields), headers=WITH_KEY, timeout=60)
        with sent as answer:
            for line in answer.iter_lines():
                if '"content"' in line:
                    texts.append(line.split('"delta":')[1])
                    if disturb and len(texts) % 20 == 5:
                        server.post("/flush_cache")
        return texts

    assert stream(disturb=True) == stream(disturb=False)


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_a_flush_needs_the_key_and_is_a_post(server: Server, path: str) -> None:
    assert httpx.post(server.url + path).status_code == 401
    assert httpx.get(server.url + path, headers=WITH_KEY).status_code == 405
    document = httpx.get(f"{server.url}/openapi.json", headers=WITH_KEY, timeout=60).json()
    assert list(document["paths"][path]) == ["post"]


def question(last: str, mark: bool = True, **fields: Any) -> dict[str, Any]:
    """An image and text, kept for an hour, then a few words."""
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if mark else {}
    parts = (image_part(picture(90, 120, seed=31)), {**text_part("what is there? " * 8), **kept})
    settings = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "cache_salt": "kept"}
    return {"messages": [user(*parts, text_part(last))], **settings, **fields}


def test_a_breakpoint_is_kept_told_and_ended_by_a_flush(server: Server) -> None:
    def answer(body: dict[str, Any]) -> Any:
        body = {**body, "prompt_cache_diagnostics": True, "saccade": {"trace": True}}
        return server.post("/v1/chat/completions", body)

    first, again = answer(question("Now?")), answer(question("Or later?"))
    wrote = first["usage"]["prompt_tokens_details"]
    assert 0 < wrote["cache_write_tokens"] <= first["usage"]["prompt_tokens"]
    assert wrote["image_tokens"] == first["saccade"]["images"][0]["tokens"]
    assert first["saccade"]["prompt"]["kept"] == {"3600s": wrote["cache_write_tokens"]}
    assert first["diagnostics"]["cache_miss_reason"]["type"] == "never_seen"
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= wrote["cache_write_tokens"]
    assert details["cache_write_tokens"] == 0
    reason = again["diagnostics"]["cache_miss_reason"]
    assert (reason["type"], reason["place"]) == ("prompt_changed", "messages[0].content[2]")
    assert server.metric("saccade_pinned", cache="kv") > 0
    assert server.metric("saccade_pinned", cache="embeddings") > 0
    server.post("/flush_cache")
    assert server.metric("saccade_pinned", cache="kv") == 0
    assert server.metric("saccade_pinned", cache="embeddings") == 0
    late = answer(question("Now?"))["diagnostics"]["cache_miss_reason"]
    assert (late["type"], late["place"]) == ("flushed", "messages[0].content[0]")
