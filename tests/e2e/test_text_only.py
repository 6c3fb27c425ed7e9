"""A server without a vision tower: text is answered, images are refused in the words of the API
asked, and start-up says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.families.text_alone import cut_out
from tests.fixtures.tiny import make_checkpoint

pytestmark = pytest.mark.slow
IMAGE = "data:image/png;base64,AAAA"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("model")
    folder = cut_out(make_checkpoint(base / "whole", "qwen3_5"), base / "text")
    with serving(folder, Path(base), "--max-total-tokens", "4096") as server:
        yield server


def test_text_is_answered_and_start_up_says_what_there_is(server: Server) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"model": model})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    said = server.log.read_text()
    assert "none: this model is text-only" in said and "sent images" not in said


def test_images_are_refused_by_every_api(server: Server) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    chat = {"type": "image_url", "image_url": {"url": IMAGE}}
    item = {"type": "input_image", "image_url": IMAGE}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [item]}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 3,
        },
    }
    for path, body in asked.items():
        answer = httpx.post(f"{server.url}{path}", json=body | {"model": model})
        assert answer.status_code == 400, path
        assert "this model has no vision" in answer.json()["error"]["message"], path
    upload = httpx.post(
        f"{server.url}/v1/files",
        data={"purpose": "vision"},
        files={"file": ("a.png", b"\x89PNG")},
    )
    assert upload.status_code == 400 and upload.json()["error"]["code"] == "no_vision"
