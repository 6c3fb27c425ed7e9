"""What a client sends instead of a body: bytes that it has not sent, names, and the body itself
wherever a server answers oddly.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from saccade.core.client import Client
from saccade.core.errors import InvalidRequest, UnknownDigests
from saccade.edge import related
from saccade.edge.related import RelatedBody, boundary_of
from saccade.edge.sent_bytes import SentBytes
from saccade.tools import send_once
from saccade.tools.send_once import (
    LEAST,
    Attempt,
    AttemptReply,
    NamedBody,
    ServerConversation,
    VersionQuestion,
)
from tests.helpers.images import data_url

VERSION = AttemptReply(
    200, b'{"version": "1", "accepts": ["application/json", "multipart/related"]}'
)
OK = AttemptReply(200)


def data(seed: int, size: int = 3000) -> bytes:
    return random.Random(seed).randbytes(size)


def url(given: bytes) -> str:
    return data_url(given)


def refused(code: str, *digests: str) -> AttemptReply:
    told = {"error": {"message": "", "code": code, "digests": digests}}
    return AttemptReply(400, json.dumps(told).encode())


class Server:
    """What reads bodies on the other side. bodies: as it read them."""

    def __init__(self) -> None:
        self.sent = SentBytes(1 << 24)
        self.bodies: list[bytes] = []

    def __call__(self, attempt: Attempt | VersionQuestion) -> AttemptReply:
        if isinstance(attempt, VersionQuestion):
            return VERSION
        if attempt.content_type is None:
            self.bodies.append(bytes(attempt.body))
            return OK
        parsed = RelatedBody(attempt.body, boundary_of(attempt.content_type))
        try:
            found = parsed.find(self.sent, Client())
        except UnknownDigests as error:
            return refused("unknown_digests", *error.digests)
        self.bodies.append(bytes(parsed.whole(found)))
        return OK


def send(
    conversation: ServerConversation,
    body: bytes,
    server: Callable[[Attempt | VersionQuestion], AttemptReply],
    sender: str = "",
) -> list[Attempt]:
    """The attempts that a body took."""
    flow = conversation.flow(body, sender)
    step, attempts = next(flow), []
    while True:
        if isinstance(step, Attempt):
            attempts.append(step)
        try:
            step = flow.send(server(step))
        except StopIteration:
            return attempts


# ---- bodies


@pytest.mark.parametrize(
    "told",
    [
        {"url": url(data(1))},
        {"data": base64.b64encode(data(2)).decode(), "é": "ü\u2028 \\ \" /"},
        {"a": [url(data(3)), "text " * 999, url(data(3)), url(data(4, 3001)), url(data(5, 3002))]},
        {"says": json.dumps({"url": url(data(6))})},
        {"text": "a" * 4096},
        [url(data(7, 200_000))],
    ],
)  # fmt: skip
def test_a_server_reads_the_clients_bytes(told: object) -> None:
    for body in (
        json.dumps(told).encode(),
        json.dumps(told, ensure_ascii=False, indent=1).encode(),
    ):
        server, conversation = Server(), ServerConversation()
        for _ in range(3):
            send(conversation, body, server)
        assert server.bodies == [body] * 3


@pytest.mark.parametrize(
    "inside",
    [
        base64.b64encode(data(1, LEAST // 2)).decode(),  # short
        base64.b64encode(data(1)).decode()[:-1],  # cut
        base64.b64encode(data(1, 3001)).decode().rstrip("="),  # no padding
        base64.b64encode(data(1, 3001)).decode()[:-4] + "QR==",  # bits that nobody reads
        base64.urlsafe_b64encode(b"\xfb\xff" * 1500).decode(),
        base64.encodebytes(data(1)).decode(),
        base64.b64encode(b"\xff" * 3000).decode().replace("/", "\\/"),
    ],
)
def test_what_would_come_back_otherwise_stays(inside: str) -> None:
    assert NamedBody(json.dumps({"data": inside}).encode()).names == ()
    assert NamedBody(b'{"data": "' + inside.encode() + b'"}').names == ()


@pytest.mark.parametrize("body", [b"", b'"', b'"' * 5000, b"{" * 5000, b"A" * 5000, bytes(5000)])
def test_a_body_that_is_no_json_stays(body: bytes) -> None:
    server = Server()
    (attempt,) = send(ServerConversation(), body, server)
    assert attempt == Attempt(body)


class Searched(bytes):
    """A body that counts the searches in it."""

    searches = 0

    def find(self, *wanted: Any) -> int:
        self.searches += 1
        return super().find(*wanted)


@pytest.mark.parametrize("piece", [b'"', b'"",', b'"' + b"A" * 511, b'"a":"b",', b";base64,"])
def test_a_body_costs_searches_by_its_size_and_not_by_its_quotes(piece: bytes) -> None:
    body = Searched(piece * (1_000_000 // len(piece)) + b'"')
    assert NamedBody(body).names == ()
    assert body.searches <= len(body) // (LEAST // 2) + 1


def test_base64_is_found_wherever_it_stands() -> None:
    long = base64.b64encode(data(1, LEAST // 4 * 3)).decode()
    assert len(long) == LEAST
    for before in range(0, 2 * LEAST, 7):
        text = json.dumps(["-" * before, long, "", f"data:image/png;base64,{long}", "y"])
        assert len(NamedBody(text.encode())._places) == 2


def test_a_body_names_no_more_than_servers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert send_once.MAX_NAMES == related.MAX_NAMES
    monkeypatch.setattr(send_once, "MAX_NAMES", 2)
    body = json.dumps([url(data(i)) for i in range(3)]).encode()
    assert len(NamedBody(body).names) == 2
    server = Server()
    send(ServerConversation(), body, server)
    assert server.bodies == [body]


# ---- conversations


def test_bytes_go_once() -> None:
    server, conversation = Server(), ServerConversation()
    history = [url(data(1))]
    for step in range(2, 12):
        (attempt,) = send(conversation, json.dumps(history).encode(), server)
        assert (attempt.named, attempt.brought) == (len(history), 1)
        history.append(url(data(step)))
    assert conversation.savings.sent == 10
    assert conversation.savings.named == sum(range(10))
    assert conversation.savings.bytes_out < 1.4 * 10 * 3000


def test_what_a_server_has_forgotten_goes_again() -> None:
    server, conversation = Server(), ServerConversation()
    body = json.dumps([url(data(i)) for i in range(5)]).encode()
    assert [each.brought for each in send(conversation, body, server)] == [0, 5]
    server.sent = SentBytes(1 << 24)
    first, second = send(conversation, body, server)
    assert (first.brought, second.brought) == (0, 5)
    (third,) = send(conversation, body, server)
    assert third.brought == 0
    assert server.bodies == [body] * 3


def test_a_new_run_sends_what_is_new() -> None:
    server = Server()
    images = [url(data(i)) for i in range(5)]
    send(ServerConversation(), json.dumps(images[:4]).encode(), server)
    attempts = send(ServerConversation(), json.dumps(images).encode(), server)
    assert [each.brought for each in attempts] == [0, 1]


def test_a_server_that_keeps_nothing_gets_whole_bodies() -> None:
    server, conversation = Server(), ServerConversation()
    server.sent = SentBytes(0)
    body = json.dumps([url(data(i)) for i in range(5)]).encode()
    for _ in range(3):
        assert len(send(conversation, body, server)) <= 3
    assert server.bodies == [body] * 3


def test_senders_are_told_apart() -> None:
    server, conversation = Server(), ServerConversation()
    body = json.dumps([url(data(1))]).encode()
    assert send(conversation, body, server, "anna")[0].brought == 1
    assert send(conversation, body, server, "ben")[0].brought == 1
    assert send(conversation, body, server, "anna")[0].brought == 0


@pytest.mark.parametrize(
    "lie",
    [
        refused("unknown_digests"),
        refused("unknown_digests", "blake3-" + "0" * 64),
        refused("unknown_digests", *(str(i) for i in range(100_000))),
        refused("wrong_digest"),
        refused("invalid_multipart"),
        refused("too_many_names"),
        refused("unsupported_media_type"),
        AttemptReply(415),
        AttemptReply(
            400, b'{"type": "error", "error": {"details": {"error_code": "unknown_digests"}}}'
        ),
    ],
)
def test_a_server_that_lies_gets_the_body(lie: AttemptReply) -> None:
    body = json.dumps([url(data(1))]).encode()

    def server(attempt: Attempt | VersionQuestion) -> AttemptReply:
        if isinstance(attempt, VersionQuestion):
            return VERSION
        return lie if attempt.content_type else OK

    conversation = ServerConversation()
    for _ in range(3):
        attempts = send(conversation, body, server)
        assert len(attempts) <= 3
        assert attempts[-1] == Attempt(body)


@pytest.mark.parametrize(
    "answer",
    [
        AttemptReply(400, b'{"error": {"message": "", "code": "context_length_exceeded"}}'),
        AttemptReply(400, b'{"error": {"message": "", "code": 400}}'),
        AttemptReply(400, b"["),
        AttemptReply(429),
        AttemptReply(500),
    ],
)
def test_any_other_refusal_is_the_clients(answer: AttemptReply) -> None:
    body = json.dumps([url(data(1))]).encode()
    conversation = ServerConversation()

    def server(attempt: Attempt | VersionQuestion) -> AttemptReply:
        return VERSION if isinstance(attempt, VersionQuestion) else answer

    for _ in range(2):
        (attempt,) = send(conversation, body, server)
        assert attempt.brought == 1, "it may not have been read"


@pytest.mark.parametrize(
    ("said", "questions"),
    [
        (AttemptReply(404, b"nothing here"), 1),
        (AttemptReply(200, b'{"version": "0.33.0"}'), 1),
        (AttemptReply(200, b'{"version": "1", "accepts": ["application/json"]}'), 1),
        (AttemptReply(200, b"[" * 99_999), 1),
        (AttemptReply(401), 1),
        (AttemptReply(502), 3),
        (AttemptReply(429), 3),
    ],
)
def test_another_server_gets_bodies_as_they_are(said: AttemptReply, questions: int) -> None:
    body = json.dumps([url(data(1))]).encode()
    conversation, asked = ServerConversation(), 0

    def server(attempt: Attempt | VersionQuestion) -> AttemptReply:
        nonlocal asked
        if isinstance(attempt, VersionQuestion):
            asked += 1
            return said
        assert attempt == Attempt(body)
        return OK

    for _ in range(3):
        send(conversation, body, server)
    assert asked == questions


def test_a_text_asks_no_question() -> None:
    def server(attempt: Attempt | VersionQuestion) -> AttemptReply:
        assert isinstance(attempt, Attempt)
        return OK

    send(ServerConversation(), json.dumps({"messages": "hello " * 9999}).encode(), server)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_once, "MAX_REMEMBERED", 2)
    server, conversation = Server(), ServerConversation()
    bodies = [json.dumps([url(data(i))]).encode() for i in range(3)]
    for body in bodies:
        send(conversation, body, server)
    assert [send(conversation, body, server)[0].brought for body in reversed(bodies)] == [0, 0, 1]


def test_a_reader_refuses_a_boundary_that_it_cannot_have_written() -> None:
    attempt = NamedBody(json.dumps([url(data(1))]).encode()).related(())
    assert attempt.content_type is not None
    with pytest.raises(InvalidRequest):
        RelatedBody(attempt.body, "x" * 24)
