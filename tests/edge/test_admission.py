"""Bytes in flight: what is held is bounded, a refusal comes before the body, and nothing stays held
when a request has ended.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator

import pytest
from PIL import Image

from saccade.core.config import MIB
from saccade.core.options import ServerOptions
from tests.helpers.asking import BODY, Asking, eventually, held, in_flight
from tests.helpers.images import data_url
from tests.helpers.served import Served, serving

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """Two MiB of bodies and pictures at a time."""
    with serving(
        ServerOptions(port=0, served_model_name=("demo",), max_inflight_mb=2, max_body_mb=8)
    ) as served:
        yield served


def announce(served: Served, nbytes: int, sent: int = 1) -> socket.socket:
    """A client that has announced a body and sent some of it."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"application/json\r\nContent-Length: {nbytes}\r\n\r\n"
    )
    connection.sendall(head.encode() + b"{" * sent)
    return connection


def test_a_body_that_finds_no_room_is_refused_before_it_is_sent(narrow: Served) -> None:
    with announce(narrow, MIB, MIB - 1) as first:
        eventually(lambda: held(narrow) == MIB - 1)
        with announce(narrow, MIB) as second:
            answer = second.recv(4096)
            while not answer.endswith(b"}}"):
                answer += second.recv(4096)
            assert (
                answer.startswith(b"HTTP/1.1 429 ")
                and b"retry-after: 1" in answer
                and b"--max-inflight-mb" in answer
            )
        with announce(narrow, MIB // 2, MIB // 4) as third:
            eventually(lambda: held(narrow) == MIB - 1 + MIB // 4)
            third.close()
        first.close()
    eventually(lambda: held(narrow) == in_flight(narrow) == 0)
    assert narrow.engine.received == []


def test_a_body_counts_as_it_comes_not_as_it_is_announced(narrow: Served) -> None:
    with announce(narrow, 8 * MIB):
        eventually(lambda: held(narrow) == 1)
        assert narrow.http.post("/v1/chat/completions", json=BODY).status_code == 200
        big = {**BODY, "user": "x" * MIB}
        assert narrow.http.post("/v1/chat/completions", json=big).status_code == 200
        assert held(narrow) == 1


def test_large_bodies_leave_room_for_small_ones(narrow: Served) -> None:
    most = 2 * MIB * 7 // 8
    with announce(narrow, most + 1, most):
        eventually(lambda: held(narrow) == most)
        larger = {**BODY, "user": "x" * 300_000}
        assert narrow.http.post("/v1/chat/completions", json=larger).status_code == 429
        small = {**BODY, "user": "x" * 200_000}
        assert narrow.http.post("/v1/chat/completions", json=small).status_code == 200
    eventually(lambda: held(narrow) == 0)


def test_a_body_on_its_way_holds_no_permit(narrow: Served) -> None:
    with announce(narrow, MIB):
        eventually(lambda: held(narrow) == 1)
        assert in_flight(narrow) == 0
    eventually(lambda: held(narrow) == 0)


def test_a_body_of_unannounced_length_is_refused_when_it_outgrows_the_room(narrow: Served) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            yield b" " * MIB

    with announce(narrow, MIB, MIB - 1):
        eventually(lambda: held(narrow) == MIB - 1)
        assert (
            narrow.http.post("/v1/chat/completions", content=pieces(), headers=JSON).status_code
            == 429
        )
    eventually(lambda: held(narrow) == 0)
    assert (
        narrow.http.post("/v1/chat/completions", content=pieces(), headers=JSON).status_code == 400
    )  # alone it may: it is no JSON


def test_uploads_count_like_bodies(narrow: Served) -> None:
    with announce(narrow, 2 * MIB, MIB):
        eventually(lambda: held(narrow) == MIB)
        file = {"file": ("x", b"x" * MIB)}
        refused = narrow.http.post("/v1/files", data={"purpose": "vision"}, files=file)
        assert refused.status_code == 429
    eventually(lambda: held(narrow) == 0)


def test_once_understood_a_request_holds_its_pictures_only(narrow: Served) -> None:
    file = io.BytesIO()
    Image.effect_noise((128, 128), 99).save(file, "PNG")
    data = file.getvalue()
    url = data_url(data)
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    narrow.engine.paused = True
    asking = Asking(narrow, messages=[message, message], user="x" * MIB)
    eventually(lambda: held(narrow) == len(data))  # however often the request names it
    narrow.engine.paused = False
    assert asking.result().status_code == 200
    eventually(lambda: held(narrow) == 0)


def test_a_prompt_that_fails_leaves_nothing_of_those_before_it(narrow: Served) -> None:
    narrow.engine.received.clear()
    response = narrow.http.post(
        "/v1/completions", json={"model": "demo", "prompt": ["fine", "<|image_pad|>"]}
    )
    assert response.status_code == 400
    eventually(lambda: in_flight(narrow) == held(narrow) == 0)
    assert narrow.engine.received == []


def test_a_picture_of_a_request_that_is_refused_is_neither_held_nor_decoded(narrow: Served) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "teal").save(file, "PNG")
    part = {
        "type": "image_url",
        "image_url": {"url": data_url(file.getvalue())},
    }
    before = narrow.front.metrics.value("saccade_images_received_total")
    refused = narrow.http.post(
        "/v1/chat/completions",
        json={**BODY, "messages": [{"role": "user", "content": [part]}], "min_tokens": 9999},
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
    assert narrow.front.metrics.value("saccade_images_received_total") == before
    assert narrow.front.intake.media.held == 0
