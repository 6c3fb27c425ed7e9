"""An agent of fifty steps that sends its whole history, through `saccade proxy`: each screenshot's
bytes cross the wire once, and the answers are those without it. Real processes, which die on the
way.
"""

from __future__ import annotations

import io
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from blake3 import blake3
from PIL import Image, ImageDraw

from saccade_bench.fixtures.server import Server, routing, serving
from tests.helpers.images import data_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 50
MANY, FEW, OTHERS, NEAR = range(STEPS), range(100, 112), range(200, 212), range(300, 310)
RECEIVED = "saccade_images_received_total"
READY = re.compile(rb"proxy at (http://\S+)/v1")
FLOAT = ("--dtype", "float32")


class Wire:
    """Passes connections on to a server, and counts the bytes that go there."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.count = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.port))
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    counts = ends[1] is server
                    threading.Thread(target=self._pass, args=(*ends, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.count += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def wired(server: Server) -> Iterator[Wire]:
    wire = Wire(port_of(server))
    try:
        yield wire
    finally:
        wire.close()


def port_of(server: Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


class Proxied:
    """A `saccade proxy` process. It may be killed and started again."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "saccade", "proxy", "--upstream", self._upstream]
        self._process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        said = b""
        while (found := READY.search(said)) is None:
            line = self._process.stdout.readline()
            assert line, said
            said += line
        self.url = found[1].decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> str:
        """End it in order, and return its last words."""
        self._process.send_signal(signal.SIGTERM)
        said, _ = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        return said.decode()


def screenshot(step: int) -> bytes:
    """A photo on a desktop with another line of text."""
    noise = random.Random(step).randbytes(300 * 240 * 3)
    image = Image.new("RGB", (480, 270), "navy")
    image.paste(Image.frombytes("RGB", (300, 240), noise), (10, 20))
    ImageDraw.Draw(image).text((330, 40), f"step {step}", "white")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def ask(url: str, history: list[dict[str, Any]], stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    with client:
        chats: Any = client.chat.completions
        asked = {"messages": history, "max_tokens": 8, "temperature": 0, "model": "demo"}
        if not stream:
            return str(chats.create(**asked).choices[0].message.content)
        events = chats.create(**asked, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in events if each.choices)


def zoomed(step: int) -> dict[str, Any]:
    """A part of a step's screenshot, which stands in the history, by its digest."""
    name = f"blake3-{blake3(screenshot(step)).hexdigest()}"
    return {"type": "image_url", "image_url": {"digest": name, "region": [310, 20, 480, 80]}}


def run(
    address: Callable[[], str],
    steps: range,
    before: Callable[[int], None] = lambda _: None,
    zoom: Callable[[int], dict[str, Any]] | None = None,
) -> list[str]:
    """The answers of a run with whole histories, and a screenshot of each step's number. `zoom`
    makes a part of the screenshot before, which every other step shows, too.
    """
    history: list[dict[str, Any]] = []
    answers: list[str] = []
    for step in steps:
        before(step - steps.start)
        url = data_url(screenshot(step))
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [image, {"type": "text", "text": "Next?"}]
        if zoom is not None and step % 2:
            content.insert(0, zoom(step - 1))
        history.append({"role": "user", "content": content})
        answers.append(ask(address(), history, stream=step % 2 == 1))
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("log"), *FLOAT) as server:
        yield server


def test_fifty_steps_take_the_bytes_of_fifty_screenshots(server: Server) -> None:
    unique = sum(len(screenshot(step)) for step in MANY)
    with wired(server) as wire:
        proxy = Proxied(wire.url)
        answers = run(lambda: proxy.url, MANY)
        said = proxy.end()
        assert wire.count <= 1.1 * unique, (wire.count, unique)
    assert f"{STEPS} requests" in said
    assert f"{STEPS} images sent and {STEPS * (STEPS - 1) // 2} referenced by hash" in said
    with wired(server) as wire:
        assert run(lambda: wire.url, MANY) == answers
        assert wire.count > 20 * unique


def test_nothing_is_lost_when_the_proxy_and_the_server_die(server: Server, tmp_path: Path) -> None:
    wanted = run(lambda: server.url, FEW)
    with serving("demo", tmp_path, *FLOAT, status=-signal.SIGKILL) as first, wired(first) as wire:
        proxy = Proxied(wire.url)

        def before(step: int) -> None:
            if step == 4:
                proxy.kill()
                proxy.start()
            if step == 8:  # to clients, the same server again, which has kept nothing
                first.process.kill()
                first.process.wait()
                wire.port = port_of(server)

        assert run(lambda: proxy.url, FEW, before) == wanted
        said = proxy.end()
    assert "images sent 16 times" in said, "4 to 7, then all 8 again and 8 to 11"


def test_a_router_sends_names_to_who_has_the_bytes(server: Server, tmp_path: Path) -> None:
    wanted = run(lambda: server.url, OTHERS)
    unique = sum(len(screenshot(step)) for step in OTHERS)
    with (
        serving("demo", tmp_path, *FLOAT, status=-signal.SIGKILL) as other,
        routing([server, other], tmp_path) as router,
        wired(router) as wire,
    ):
        proxy = Proxied(wire.url)
        received = [each.metric(RECEIVED) for each in (server, other)]
        assert run(lambda: proxy.url, OTHERS) == wanted
        after = [each.metric(RECEIVED) for each in (server, other)]
        assert sum(now > was for was, now in zip(received, after, strict=True)) == 1
        assert wire.count <= 1.1 * unique

        def before(step: int) -> None:
            if step == 4:
                other.process.kill()
                other.process.wait()

        assert run(lambda: proxy.url, OTHERS, before) == wanted
        proxy.end()


def cut(step: int) -> dict[str, Any]:
    """The same part as a client would cut it."""
    file = io.BytesIO()
    Image.open(io.BytesIO(screenshot(step))).crop((310, 20, 480, 80)).save(file, "PNG")
    url = data_url(file.getvalue())
    return {"type": "image_url", "image_url": {"url": url}}


def test_parts_by_digest_are_known_wherever_their_screenshots_go(
    server: Server, tmp_path: Path
) -> None:
    """Through a proxy that ends, and a router of two servers, one of which is killed."""
    wanted = run(lambda: server.url, NEAR, zoom=cut)
    unique = sum(len(screenshot(step)) for step in NEAR)
    with (
        serving("demo", tmp_path, *FLOAT, status=-signal.SIGKILL) as other,
        routing([server, other], tmp_path) as router,
        wired(router) as wire,
    ):
        proxy = Proxied(wire.url)
        received = [each.metric(RECEIVED) for each in (server, other)]
        assert run(lambda: proxy.url, NEAR, zoom=zoomed) == wanted
        assert wire.count <= 1.1 * unique, (wire.count, unique)
        after = [each.metric(RECEIVED) for each in (server, other)]
        assert sum(now > was for was, now in zip(received, after, strict=True)) == 1

        def before(step: int) -> None:
            if step == 3:
                proxy.kill()
                proxy.start()
            if step == 5:
                other.process.kill()
                other.process.wait()

        assert run(lambda: proxy.url, NEAR, before, zoomed) == wanted
        proxy.end()
