"""A reader of events predicts what a real server finds cached, over a restart."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.core.client import ANYBODY
from saccade_bench.fixtures.server import serving
from tests.fixtures.tiny import picture
from tests.helpers.images import image_part, text_part, user
from tests.plugins.events.subscriber import Block, Index, Subscriber, subscribing

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

SIZE = 16
REQUESTS = 100
IMAGES = [image_part(picture(60, 90, seed=seed)) for seed in range(6)]


def body(draw: random.Random) -> dict[str, Any]:
    """A chat that begins as others do."""
    words = [draw.choice(("what is there? ", "describe it. ")) for _ in range(draw.randint(1, 9))]
    parts = [text_part("".join(words))]
    if draw.random() < 0.6:
        parts.insert(draw.randint(0, 1), draw.choice(IMAGES))
    salt = draw.choice(({}, {"cache_salt": "tenant"}))
    return {"messages": [user(*parts)], "max_tokens": 3, "temperature": 0, **salt}


def predicted(index: Index, rendered: dict[str, Any]) -> int:
    """How many tokens of a rendered prompt the server finds, by what its events have told."""
    children = {
        (block.parent, block.tokens, block.extra): name for name, block in index.blocks.items()
    }
    tokens = rendered["token_ids"]
    salt = ANYBODY.salt(rendered["cache_salt"] or "")
    features = rendered["features"] or {"mm_hashes": {}, "mm_placeholders": {}}
    hashes = features["mm_hashes"].get("image", ())
    ranges = features["mm_placeholders"].get("image", ())
    parent: int | None = None
    found = 0
    while found + SIZE < len(tokens):
        extra: list[object] = [
            (image, place["offset"] - found)
            for image, place in zip(hashes, ranges, strict=True)
            if place["offset"] < found + SIZE and place["offset"] + place["length"] > found
        ]
        extra += [salt] if salt and parent is None else []
        block = Block(parent, tuple(tokens[found : found + SIZE]), tuple(extra))
        name = children.get((block.parent, block.tokens, block.extra))
        if name is None:
            break
        parent, found = name, found + SIZE
    return found


def ask(http: httpx.Client, subscriber: Subscriber, asked: dict[str, Any]) -> tuple[int, int]:
    """Return the cached tokens, predicted and actual."""

    def up_to_date() -> bool:
        text = http.get("/metrics").raise_for_status().text
        count = re.search(r'saccade_cache_events_total{cache="kv"} (\d+)', text)
        return count is not None and subscriber.index.changes == int(count[1])

    path = "/v1/chat/completions"
    rendered = http.post(f"{path}/render", json=asked).raise_for_status().json()
    subscriber.wait_for(up_to_date)
    expected = predicted(subscriber.index, rendered)
    answer = http.post(path, json=asked).raise_for_status().json()
    return expected, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_events_predict_what_is_cached(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("kv", "kv-r", "images", "images-r")]
    names = (
        *("--kv-events-endpoint", "--kv-events-replay-endpoint"),
        *("--embedding-events-endpoint", "--embedding-events-replay-endpoint"),
    )
    options = [word for pair in zip(names, addresses, strict=True) for word in pair]
    few = ("--dtype", "float32", "--max-total-tokens", "640", "--context-length", "320")
    draw = random.Random(5)
    with subscribing(*addresses[:2]) as blocks, subscribing(*addresses[2:]) as images:
        for run in range(2):
            with serving(checkpoint("qwen3_vl"), tmp_path, *few, *options) as server:
                with httpx.Client(base_url=server.url, timeout=60) as http:
                    pairs = [ask(http, blocks, body(draw)) for _ in range(REQUESTS)]
                assert [expected for expected, _ in pairs] == [cached for _, cached in pairs]
                assert sum(cached > 0 for _, cached in pairs) > REQUESTS / 3
                assert server.metric("saccade_kv_evictions_total") > 0
                count = server.metric("saccade_kv_pages", owner="prefix")
                blocks.wait_for(lambda count=count: len(blocks.index.blocks) == count)
                count = server.metric("saccade_embeddings", tier="device")
                images.wait_for(lambda count=count: len(images.index.embeddings) == count)
                assert count > len(IMAGES)  # an image with two salts has two
                assert server.metric("saccade_cache_events_dropped_total", cache="kv") == 0
                httpx.post(f"{server.url}/flush_cache").raise_for_status()
                blocks.wait_for(lambda: not blocks.index.blocks)
                images.wait_for(lambda: not images.index.embeddings)
            assert blocks.index.starts == images.index.starts == run + 1
