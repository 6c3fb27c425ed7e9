"""A server that only encodes, and servers that have their images encoded by it: an image goes
through a vision tower once in all of them, and an encoder that dies, or is not to be trusted,
costs nobody an answer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.checkpoints import picture
from tests.e2e.server import Server, serving
from tests.e2e.test_serve import image_part, text_part, user

KEY = "a key of servers"
OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny")
KILLED = -signal.SIGKILL
ENCODED = "saccade_images_encoded_total"
ASKED = "saccade_encoder_images_total"


@contextmanager
def encoding(folder: Path, logs: Path, *options: str, status: int = 0) -> Iterator[Server]:
    own = ("--role", "encode", "--api-key", KEY, "--metrics-without-key")
    with serving(folder, logs, *OPTIONS, *own, *options, status=status) as server:
        yield server


@contextmanager
def language(
    folder: Path, logs: Path, encoders: list[str], *options: str, key: str = KEY
) -> Iterator[Server]:
    own = ("--role", "language", "--encoders", ",".join(encoders), "--encoder-key", key)
    few = ("--max-total-tokens", "8192")
    with serving(folder, logs, *OPTIONS, *few, *own, *options) as server:
        yield server


def ask(server: Server, *images: np.ndarray, text: str = "what?", tokens: int = 8) -> Any:
    """(text, what became of each image)."""
    body = {
        "model": "tiny",
        "messages": [user(*(image_part(each) for each in images), text_part(text))],
        "max_tokens": tokens,
        "temperature": 0,
        "saccade": {"trace": True},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    told = answer.raise_for_status().json()
    return told["choices"][0]["message"]["content"], told["saccade"]["images"]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_vl")


def test_an_image_is_encoded_by_the_encoder_and_here_once_that_has_died(
    folder: Path, tmp_path: Path
) -> None:
    images = [picture(64, 96, seed=1), picture(200, 320, seed=2)]
    with ExitStack() as stack:
        encoder = stack.enter_context(encoding(folder, tmp_path, status=KILLED))
        stack.callback(encoder.process.kill)
        server = stack.enter_context(language(folder, tmp_path, [encoder.url]))
        text, found = ask(server, *images)
        assert [image["found"] for image in found] == ["encoder"] * 2
        assert [image["encoder"] for image in found] == ["embedding"] * 2
        assert encoder.metric(ENCODED) == 2 and server.metric(ENCODED) == 0
        httpx.post(f"{server.url}/flush_cache")
        assert ask(server, *images)[0] == text
        assert encoder.metric("saccade_embeddings_sent_total", source="cache") == 2
        assert encoder.metric(ENCODED) == 2, "the encoder still has them"
        assert httpx.post(f"{encoder.url}/internal/embedding").status_code == 401

        encoder.process.kill()
        encoder.process.wait()
        httpx.post(f"{server.url}/flush_cache")
        again, found = ask(server, *images)
        assert again == text, "whoever encodes, the answer is the same"
        assert [image["found"] for image in found] == ["none"] * 2
        assert {image["encoder"] for image in found} <= {"unreachable", "away"}
        assert server.metric(ENCODED) == 2
