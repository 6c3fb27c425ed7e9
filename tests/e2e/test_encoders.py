"""A server that only encodes, and servers that have their images encoded by it: an image goes
through a vision tower once in all of them, and an encoder that dies, or is not to be trusted,
costs nobody an answer.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from blake3 import blake3

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import picture
from tests.helpers.images import content, image_part, text_part, user

pytestmark = pytest.mark.more

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
    asked = user(*map(image_part, images), text_part(text))
    told = server.chat(asked, max_tokens=tokens, saccade={"trace": True})
    return content(told), told["saccade"]["images"]


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
        server.post("/flush_cache")
        assert ask(server, *images)[0] == text
        assert encoder.metric("saccade_embeddings_sent_total", source="cache") == 2
        assert encoder.metric(ENCODED) == 2, "the encoder still has them"
        assert httpx.post(f"{encoder.url}/internal/embedding").status_code == 401

        encoder.process.kill()
        encoder.process.wait()
        server.post("/flush_cache")
        again, found = ask(server, *images)
        assert again == text, "whoever encodes, the answer is the same"
        assert [image["found"] for image in found] == ["none"] * 2
        assert {image["encoder"] for image in found} <= {"unreachable", "away"}
        assert server.metric(ENCODED) == 2


# ---- slow: several servers, load, and encoders that are not to be trusted


class Crooked(ThreadingHTTPServer):
    """Stands between a server and an encoder, and does to answers what `twist` does."""

    def __init__(self, encoder: Server, twist: Callable[[dict[str, str], bytes], bytes]) -> None:
        self.asked = 0
        crooked = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                crooked.asked += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
                told = httpx.post(encoder.url + self.path, content=body, headers=headers)
                given = dict(told.headers)
                content = twist(given, told.content) if told.is_success else told.content
                self.send_response(told.status_code)
                self.send_header("content-length", str(len(content)))
                if EMBEDDING in given:
                    self.send_header(EMBEDDING, given[EMBEDDING])
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


EMBEDDING = "x-saccade-embedding"


def flipped(_: dict[str, str], content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def no_numbers(headers: dict[str, str], content: bytes) -> bytes:
    """With their own checksum, as an encoder whose weights are damaged sends them."""
    bad = b"\xff" * len(content)
    before, after = (blake3(each).hexdigest() for each in (content, bad))
    headers[EMBEDDING] = headers[EMBEDDING].replace(before, after)
    return bad


def cut(_: dict[str, str], content: bytes) -> bytes:
    return content[:-4]


def longer(_: dict[str, str], content: bytes) -> bytes:
    return content + b"more"


def unnamed(headers: dict[str, str], content: bytes) -> bytes:
    headers[EMBEDDING] = "{"
    return content


def another(headers: dict[str, str], content: bytes) -> bytes:
    headers[EMBEDDING] = headers[EMBEDDING].replace('"fingerprint":"', '"fingerprint":"00')
    return content


def late(_: dict[str, str], content: bytes) -> bytes:
    time.sleep(3)
    return content


@pytest.mark.slow
def test_an_encoder_that_is_not_to_be_trusted_costs_nobody_an_answer(
    folder: Path, tmp_path: Path
) -> None:
    """Whatever comes instead of an embedding, the answer is that of one server, and what was wrong
    is counted by its kind.
    """
    kinds = {
        flipped: "damaged",
        no_numbers: "damaged",
        cut: "damaged",
        longer: "damaged",
        unnamed: "damaged",
        another: "damaged",
        late: "slow",
    }
    with encoding(folder, tmp_path) as encoder, serving(folder, tmp_path, *OPTIONS) as alone:
        for number, (twist, kind) in enumerate(kinds.items()):
            image = picture(96, 64, seed=100 + number)
            crooked = Crooked(encoder, twist)
            wait = ("--tune", "fetch_timeout=1.5")
            with language(folder, tmp_path, [crooked.url], *wait) as server:
                text, found = ask(server, image)
                assert crooked.asked and server.metric(ASKED, outcome=kind) == 1, twist
                assert [(each["found"], each["encoder"]) for each in found] == [("none", kind)]
                assert server.metric(ENCODED) == 1 and text == ask(alone, image)[0]
                assert ask(server, picture(96, 64, seed=200))[1][0]["encoder"] == "away"
            crooked.shutdown()
            crooked.server_close()


@pytest.mark.slow
def test_another_tower_and_another_key_are_refused_by_name(
    folder: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = checkpoint("qwen3_vl", seed=7)
    image = picture(64, 64, seed=300)
    with encoding(other, tmp_path) as encoder:
        with language(folder, tmp_path, [encoder.url]) as server:
            assert ask(server, image)[1][0]["encoder"] == "refused"
            assert "the request is for the vision encoder" in server.log.read_text()
        with language(other, tmp_path, [encoder.url], key="wrong") as server:
            assert ask(server, image)[1][0]["encoder"] == "refused"
            assert "it returned 401" in server.log.read_text()
        assert encoder.metric(ENCODED) == 0
        with httpx.Client(base_url=encoder.url, headers={"x-api-key": KEY}) as client:
            assert client.post("/v1/chat/completions").status_code == 404
            for told in ("", "{}", '{"image":1}'):
                asked = client.post("/internal/embedding", headers={"x-saccade-image": told})
                assert asked.status_code == 400, asked.text
            assert client.get("/health").is_success


@pytest.mark.slow
def test_two_servers_with_one_encoder_have_each_image_encoded_once(
    folder: Path, tmp_path: Path
) -> None:
    """Both ask for the same images at the same time, large and small, of two encoders."""
    images = [picture(64 + 32 * (n % 9), 448, seed=400 + n) for n in range(24)]
    with ExitStack() as stack:
        start = [encoding(folder, tmp_path), encoding(folder, tmp_path)]
        with ThreadPoolExecutor(4) as pool:
            encoders = list(pool.map(stack.enter_context, start))
            urls = [each.url for each in encoders]
            more = [language(folder, tmp_path, urls) for _ in range(2)]
            more.append(serving(folder, tmp_path, *OPTIONS))
            *servers, alone = pool.map(stack.enter_context, more)
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, each, image) for image in images for each in servers]
            told = [each.result() for each in asked]
        right = [ask(alone, image)[0] for image in images]
        assert [text for text, _ in told] == [text for text in right for _ in servers]
        assert len(set(right)) > 1
        assert {found[0]["found"] for _, found in told} == {"encoder"}
        encodes = [each.metric(ENCODED) for each in encoders]
        assert sum(encodes) == len(images) and min(encodes) > 0
        assert [each.metric(ENCODED) for each in servers] == [0, 0]
        sent = "saccade_embeddings_sent_total"
        towers = sum(each.metric(sent, source="tower") for each in encoders)
        caches = sum(each.metric(sent, source="cache") for each in encoders)
        print(f"\n{towers:.0f} sent as they were encoded, {caches:.0f} found")
        assert towers + caches == 2 * len(images) and towers == len(images)


@pytest.mark.slow
def test_an_encoder_that_is_killed_under_load(folder: Path, tmp_path: Path) -> None:
    """One of two encoders, then the other: every request is answered, and rightly; requests
    without images are as they were.
    """
    images = [picture(96, 64 + 32 * (n % 5), seed=500 + n) for n in range(60)]
    with ExitStack() as stack:
        start = [encoding(folder, tmp_path, status=KILLED) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            encoders = list(pool.map(stack.enter_context, start))
        for encoder in encoders:
            stack.callback(encoder.process.kill)
        server = stack.enter_context(language(folder, tmp_path, [each.url for each in encoders]))
        families = [psutil.Process(each.process.pid).children(recursive=True) for each in encoders]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, server, image, tokens=4) for image in images]
            for number, encoder in enumerate(encoders, 1):
                while sum(each.done() for each in asked) < 15 * number:
                    time.sleep(0.01)
                encoder.process.kill()
            told = [each.result(timeout=120) for each in asked]
        assert not psutil.wait_procs([child for f in families for child in f], timeout=5)[1]
        outcomes = Counter(found[0].get("encoder", "") for _, found in told)
        print(f"\n{dict(outcomes)}")
        assert outcomes["embedding"] >= 15 and set(outcomes) <= {"embedding", "unreachable", "away"}
        local = sum(found[0]["found"] == "none" for _, found in told)
        assert server.metric(ENCODED) == local == len(images) - outcomes["embedding"] > 0
        server.post("/flush_cache")
        for image, (text, _) in list(zip(images, told, strict=True))[::6]:
            assert ask(server, image, tokens=4)[0] == text
