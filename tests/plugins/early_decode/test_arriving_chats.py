"""A server with early_decode=true: what is counted before a body's last byte is here, in each API,
and that answers, errors and what stays are as without.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from saccade.core.options import ServerOptions
from saccade.ipc.messages import PixelsReady
from saccade.plugins.early_decode.options import EarlyDecodeOptions
from saccade_bench.attacks import raw
from tests.helpers.asking import eventually, held, in_flight
from tests.helpers.images import data_url, image_part, user
from tests.helpers.served import Served, serving
from tests.media.pictures import encode, noise

EARLY, UNUSED = "saccade_early_decodes_total", "saccade_early_decodes_unused_total"
DECODES = "saccade_decodes_total"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LAST = 20
"""Bytes that are sent after a pause."""
_seeds, _hosts = count(1000), count(2)


@pytest.fixture(scope="module")
def early() -> Iterator[Served]:
    options = ServerOptions(port=0, served_model_name=("demo",), max_body_mb=8)
    with serving(options, extras=(EarlyDecodeOptions(True),)) as served:
        yield served


def new_image() -> bytes:
    return encode(noise(192, 192, next(_seeds)))


def sourced(data: bytes) -> dict[str, Any]:
    """An image as Anthropic's clients write it."""
    text = data_url(data).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": text}
    return {"type": "image", "source": source}


def asked_in(path: str, *images: bytes, **fields: Any) -> dict[str, Any]:
    """A request in one of the APIs. What follows its images is longer than `LAST`."""
    if path == CHAT:
        body: dict[str, Any] = {"messages": [user(*map(image_part, images))]}
    elif path == MESSAGES:
        body = {"messages": [user(*map(sourced, images))], "max_tokens": 4}
    else:
        parts = [{"type": "input_image", "image_url": data_url(image)} for image in images]
        body = {"input": [{"role": "user", "content": parts}]}
    return {"model": "demo", **body, "temperature": 0, **fields}


class Sending:
    """A request whose last bytes wait. Each is of another address."""

    def __init__(self, served: Served, path: str, body: dict[str, Any], short: int = LAST) -> None:
        data = raw.post(path, body)
        self.connection = raw.connect(served.address, source=f"127.0.0.{next(_hosts)}")
        self.connection.sendall(data[:-short])
        self._rest = data[-short:]

    def finish(self) -> raw.Answer:
        with self.connection:
            self.connection.sendall(self._rest)
            return raw.read(self.connection)

    def abort(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()


def value(served: Served, name: str) -> float:
    return served.front.metrics.value(name)


def pixels(served: Served) -> list[bytes]:
    """The names of the pixels that the engine got."""
    return [each.pixels for each in served.engine.received if isinstance(each, PixelsReady)]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_new_image_is_decoded_before_the_last_byte_is_here(early: Served, path: str) -> None:
    early.engine.received.clear()
    before, unused, image = value(early, DECODES), value(early, UNUSED), new_image()
    sending = Sending(early, path, asked_in(path, image))
    eventually(lambda: value(early, DECODES) == before + 1)
    assert early.engine.received == [], "the engine has not asked for it"
    answer = sending.finish()
    assert answer.status == 200, answer.body
    assert value(early, DECODES) == before + 1, "an image is decoded once"
    eventually(lambda: held(early) == in_flight(early) == 0)
    assert value(early, UNUSED) == unused
    salted = early.http.post(CHAT, json=asked_in(CHAT, image, cache_salt="another"))
    assert salted.status_code == 200
    first, second = pixels(early)
    assert first == second, "the pixels are those of any other decode"


def test_an_answer_and_an_error_are_those_of_a_server_without(early: Served) -> None:
    broken = b"\x89PNG\r\n\x1a\n" + bytes(100_000)
    cut = new_image()[:70_000]
    with serving(early.server._options) as other:
        for body in (
            asked_in(CHAT, new_image()),
            asked_in(CHAT, broken),
            asked_in(CHAT, cut),
            asked_in(CHAT, new_image(), temperature=-1),
            asked_in(CHAT, new_image(), cache_salt="salt"),
            asked_in(CHAT, *[new_image()] * 3),
        ):
            answers = [Sending(served, CHAT, body).finish() for served in (early, other)]
            texts = [_lasting(answer) for answer in answers]
            assert texts[0] == texts[1]
    eventually(lambda: held(early) == in_flight(early) == 0)


def _lasting(answer: raw.Answer) -> tuple[int, object]:
    """What two equal requests have in common."""
    body = json.loads(answer.body)
    if "error" in body:
        return answer.status, body["error"]
    return answer.status, (body["choices"], body["usage"])


def test_an_image_that_comes_twice_is_decoded_once(early: Served) -> None:
    before, image = value(early, DECODES), new_image()
    sending = Sending(early, CHAT, asked_in(CHAT, image, image))
    eventually(lambda: value(early, DECODES) == before + 1)
    assert sending.finish().status == 200
    assert value(early, DECODES) == before + 1
    assert Sending(early, CHAT, asked_in(CHAT, image)).finish().status == 200
    assert value(early, DECODES) == before + 1


def test_images_of_a_client_that_leaves_are_released(early: Served) -> None:
    before, unused = value(early, EARLY), value(early, UNUSED)
    sending = Sending(early, CHAT, asked_in(CHAT, *(new_image() for _ in range(40))))
    eventually(lambda: value(early, EARLY) > before)
    sending.abort()
    eventually(lambda: value(early, UNUSED) == unused + 1)
    eventually(lambda: held(early) == in_flight(early) == 0)
    assert early.front.intake.media.decoders.early == {}
    assert Sending(early, CHAT, asked_in(CHAT, new_image())).finish().status == 200


def test_an_image_in_a_field_that_is_ignored_is_released(early: Served) -> None:
    before, unused = value(early, EARLY), value(early, UNUSED)
    body = {"client_metadata": {"url": data_url(new_image())}, **asked_in(CHAT)}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    sending = Sending(early, CHAT, body)
    eventually(lambda: value(early, EARLY) == before + 1)
    assert held(early) > 0
    assert sending.finish().status == 200
    eventually(lambda: value(early, UNUSED) == unused + 1)
    eventually(lambda: held(early) == 0)


def test_nothing_is_started_for_a_body_that_is_refused(early: Served) -> None:
    before = value(early, EARLY)
    body = asked_in(CHAT, *(new_image() for _ in range(80)))
    assert Sending(early, CHAT, body).finish().status == 413
    assert value(early, EARLY) == before


def test_nothing_is_started_without_the_key() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",), api_key="secret")
    with serving(options, extras=(EarlyDecodeOptions(True),)) as served:
        sending = Sending(served, CHAT, asked_in(CHAT, new_image()))
        with sending.connection as connection:
            assert raw.read(connection).status == 401
        assert value(served, EARLY) == value(served, DECODES) == 0
