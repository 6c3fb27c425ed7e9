"""Computers over HTTP: a real server on random weights at temperature 1, a Qwen2.5-VL, whose
coordinates are the resized image's pixels. Whatever it does is on the screenshot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import data_url, png

pytestmark = pytest.mark.more

SIZE = (1366, 768)
OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "65536")


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("computer")
    with serving(checkpoint("qwen2_5_vl"), folder, *OPTIONS) as server:
        yield server


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": data_url(png(size=SIZE))}
    body = {
        "model": "tiny",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Go."}, image]}],
        "tools": [{"type": "computer"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "max_output_tokens": 400,
        **fields,
    }
    told: dict[str, Any] = server.post("/v1/responses", body)
    return told


def points(action: dict[str, Any]) -> list[tuple[int, int]]:
    found = action.get("path", [action] if "x" in action else [])
    return [(each["x"], each["y"]) for each in found]


def test_what_a_model_does_is_on_the_screenshot(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda seed: respond(server, seed=seed), range(24))]
    done = [each for each in answers if each["status"] == "completed"]
    assert len(done) >= 8
    seen = set()
    for answer in done:
        (call,) = answer["output"]
        (action,) = call["actions"]
        seen.add(action["type"])
        for x, y in points(action):
            assert 0 <= x < SIZE[0] and 0 <= y < SIZE[1], json.dumps(action)
    assert len(seen) >= 3
    assert "computer use: computer_use (as Qwen publishes it)" in server.log.read_text()
