"""An arena that holds one picture: decoding waits, every request is answered, and nothing is
decoded in vain.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import image_part, text_part, user

pytestmark = pytest.mark.more
ARENA = 1 << 20
LARGE = 416 * 448 * 3
"""Bytes of a large picture: more than half of the arena."""

DECODED, ENCODED = "saccade_images_decoded_total", "saccade_images_encoded_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Nothing is kept that is not in use, and one request runs at a time: pixels come early, and
    what was there may be gone again.
    """
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    rules = folder / "preprocessor_config.json"
    rules.write_text(
        json.dumps(
            json.loads(rules.read_text())
            | {"size": {"shortest_edge": 1024, "longest_edge": ARENA // 3}}
        )
    )
    caches = (
        *("--tune", "disable_radix_cache=true"),
        "--embedding-cache-device-mb",
        "0",
        *("--tune", "embedding_cache_host_mb=0"),
    )
    sizes = (
        *("--tune", "arena_mb=1"),
        "--max-total-tokens",
        "16384",
        "--max-running-requests",
        "1",
        "--chunked-prefill-size",
        "128",
    )
    options = ("--dtype", "float32", "--served-model-name", "tiny")
    with serving(folder, tmp_path_factory.mktemp("log"), *options, *caches, *sizes) as server:
        yield server


def image(seed: int, scale: float = 8) -> dict[str, Any]:
    """A small file that is large once it is resized: 52 x 56 pixels, `scale` times as high and
    wide.
    """
    return image_part(picture(52, 56, seed=seed), min_pixels=int(52 * 56 * scale**2))


def ask(server: Server, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [user(*parts, text_part("which is it?"))]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    return server.send("/v1/chat/completions", body)


def answered(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text


@pytest.mark.slow
def test_every_request_is_answered_through_an_arena_that_holds_one_picture(server: Server) -> None:
    asked = [[image(100 * i), image(100 * i + 1)] for i in range(6)] + [
        [image(9000 + i) for i in range(6)]
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(ask, server, *parts) for parts in asked]
        most = watch(server, waiting)
        for each in waiting:
            answered(each.result())
    assert [server.metric(name) for name in (DECODED, ENCODED)] == [18, 18]
    assert LARGE <= most <= ARENA
    server.wait_for_metric("saccade_arena_bytes_in_use", 0)


def watch(server: Server, waiting: list[Future[httpx.Response]]) -> float:
    """The most bytes of the arena seen in use until all is answered."""
    most = 0.0
    while not all(each.done() for each in waiting):
        most = max(most, server.metric("saccade_arena_bytes_in_use"))
        time.sleep(0.01)
    return most


def test_pixels_that_came_too_early_make_room_for_those_that_are_needed_first(
    server: Server,
) -> None:
    lost = image(1)
    answered(ask(server, lost))
    before = server.metric(DECODED)
    with ThreadPoolExecutor(5) as pool:
        with running(server):
            # The embedding of `lost` is there when this one queues up, and has gone when it gets
            # that far.
            first = pool.submit(ask, server, image(2), image(3), lost)
            server.wait_for_metric("saccade_requests_waiting", 1)
            later = [
                pool.submit(ask, server, image(10 * i), image(10 * i + 1)) for i in range(1, 4)
            ]
            server.wait_for_metric("saccade_requests_waiting", 4)
        for each in (first, *later):
            answered(each.result())
    assert 9 <= server.metric(DECODED) - before <= 10, "one came too early at most"


def test_a_picture_rounded_up_beyond_the_arena_is_refused_at_its_place_before_it_is_decoded(
    server: Server,
) -> None:
    """567 x 610 pixels would fit; whole patches make it 576 x 640."""
    before = server.metric(DECODED)
    response = ask(server, image(5, scale=1), image(6, scale=10.9))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "image_too_large")
    assert "shared memory holds 1 MiB" in error["message"] and "--tune arena_mb" in error["message"]
    assert server.metric(DECODED) == before


@contextmanager
def running(server: Server) -> Iterator[None]:
    """A request that takes the only place."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        stream = response.iter_bytes()
        next(stream)
        yield
