"""A real server whose image workers have a hole: one key's code paints over another's image."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.demo.run import QUESTIONS
from saccade.ipc.own_server import free_port
from saccade_bench.fixtures.server import Server, wait_until_ready
from tests.helpers.images import content, image_part, text_part, user
from tests.media import holed
from tests.media.pictures import encode, noise

pytestmark = pytest.mark.more

ENCODED = "saccade_images_encoded_total"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("anna:key-a\nmallory:key-m\n")
    port = free_port()
    few = ("--media-workers", "1", "--threads", "1", "--metrics-without-key")
    serve = ("serve", "demo", *few, "--api-keys-file", str(keys), "--port", str(port))
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", holed.__name__, *serve], stdout=out, stderr=out
        ) as process,
    ):
        served = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            wait_until_ready(served)
            yield served
        finally:
            process.send_signal(signal.SIGTERM)


def ask(server: Server, key: str, image: bytes, **more: Any) -> str:
    asked = user(image_part(image), text_part(QUESTIONS[0].question))
    return str(content(replace(server, key=key).chat(asked, **more)))


def test_an_image_is_answered_and_cached_as_it_is_whatever_another_key_sends(
    server: Server,
) -> None:
    image = QUESTIONS[0].images[0].read_bytes()
    told = ask(server, "key-a", image, cache_salt="before")
    evil = holed.with_code(encode(noise(64, 64)), holed.BLACKEN)
    ask(server, "key-m", evil)
    assert ask(server, "key-m", image) != told, "the attack works"
    encoded = server.metric(ENCODED)
    for _ in range(2):
        assert ask(server, "key-a", image) == told
        assert server.metric(ENCODED) == encoded + 1
