"""Two keys of one real server: neither finds, continues, evicts or holds up what is the other's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from saccade_bench.attacks import raw
from saccade_bench.attacks.watch import watching
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.ways import WAYS, perhaps_routed
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import image_part, text_part, user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENCODED = "saccade_images_encoded_total"
CHAT = "/v1/chat/completions"
Mark = dict[str, Any]
NO_MARK: Mark = {}
HOUR: Mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
        },
    },
}


@pytest.fixture(scope="module", params=WAYS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("anna:key-a\nben:key-b\n")
    options = ("--dtype", "float32", "--api-keys-file", str(keys), "--metrics-without-key")
    room = ("--max-total-tokens", "4096", "--tune", "write_timeout=2")
    logs = tmp_path_factory.mktemp("log")
    with serving(folder, logs, *options, *room) as served:
        with perhaps_routed(served, request.param, logs, *room[2:]) as server:
            yield server


@pytest.fixture
def keyed(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    with ExitStack() as stack:
        headers = [{"authorization": f"Bearer {key}"} for key in ("key-a", "key-b")]
        anna, ben = (
            stack.enter_context(httpx.Client(base_url=server.url, headers=each, timeout=60))
            for each in headers
        )
        yield anna, ben


def shown(seed: int, words: str = "what is there? ", mark: Mark = NO_MARK) -> dict[str, Any]:
    parts = (image_part(picture(90, 120, seed=seed)), {**text_part(words * 8), **mark})
    settings = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return {
        "messages": [user(*parts, text_part("Now?"))],
        "prompt_cache_diagnostics": True,
        **settings,
    }


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[int, str | None]:
    """Tokens of the prompt that were cached, and why the others were not."""
    answer = client.post(CHAT, json=body).raise_for_status().json()
    reason = answer["diagnostics"]["cache_miss_reason"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], reason and reason["type"]


def test_one_key_finds_nothing_of_anothers(
    server: Server, keyed: tuple[httpx.Client, httpx.Client]
) -> None:
    anna, ben = keyed
    assert ask(anna, shown(1)) == (0, "never_seen")
    encoded = server.metric(ENCODED)
    assert ask(anna, shown(1))[0] > 0 and server.metric(ENCODED) == encoded
    for salt in ("", "anna", "key-a"):  # whatever ben says of himself
        assert ask(ben, {**shown(1), "cache_salt": salt})[0] == 0
    assert server.metric(ENCODED) == encoded + 3


def test_a_flood_of_one_keys_pins_takes_nothing_of_anothers(
    server: Server, keyed: tuple[httpx.Client, httpx.Client]
) -> None:
    anna, ben = keyed
    first, _ = ask(ben, shown(2, mark=HOUR))  # perhaps what all prompts begin with
    encoded = server.metric(ENCODED)
    for seed in range(100, 160):  # as many tokens as the whole cache three times over
        salt = {"cache_salt": str(seed)} if seed % 2 else {}
        ask(anna, {**shown(seed, f"{seed} what is there? ", HOUR), **salt})
    assert server.metric(ENCODED) == encoded + 60
    assert server.metric("saccade_pins_evicted_total", cache="kv") > 0
    cached, _ = ask(ben, shown(2, mark=HOUR))
    assert cached > first + 64 and server.metric(ENCODED) == encoded + 60


def test_unread_streams_of_calls_end_and_hold_nobody_up(
    server: Server, keyed: tuple[httpx.Client, httpx.Client]
) -> None:
    asked = {"messages": [user(text_part("Hi"))], "tools": [TOOL], "tool_choice": "required"}
    body = {**asked, "stream": True, "n": 4, "max_tokens": 900, "logprobs": True}
    body |= {"top_logprobs": 20, "temperature": 1}
    with ExitStack() as stack, watching(server.process.pid, server.url) as cost:
        for _ in range(8):
            connection = stack.enter_context(raw.connect(server.url, receive_buffer=4096))
            connection.sendall(raw.post(CHAT, body, authorization="Bearer key-a"))
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: ask(keyed[1], shown(3)), range(8)))
        assert len(answers) == 8
        server.wait_for_metric("saccade_requests_in_flight", 0)
    assert cost.failures == 0
    assert "Traceback" not in server.log.read_text()
