"""Requests that offer another protocol, and clients of HTTP/1.0: a server, a router and a proxy
answer them as if they spoke plain HTTP/1.1, however their bytes are cut.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from saccade_bench.attacks import raw
from tests.helpers.images import png
from tests.helpers.served import proxied, routed, serving

CHAT = "/v1/chat/completions"
HI = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
OWN = re.compile(rb'"?(chatcmpl|msg|resp|req|file|rs)[-_][0-9a-zA-Z_-]{16,}|"created(_at)?": ?\d+')
"""What differs from answer to answer."""
VIA = ("server", "router", "proxy")


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    with serving() as served, routed(served) as through, proxied(served.address) as (address, _):
        yield {"server": served.address, "router": through.address, "proxy": address}


@pytest.fixture(params=VIA)
def address(addresses: dict[str, str], request: pytest.FixtureRequest) -> str:
    return addresses[request.param]


OFFERS = {
    "h2c": ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAA"),
    "websocket": (
        "connection: keep-alive, upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    ),
    "tls": ("upgrade: TLS/1.2, HTTP/2.0", "connection: Upgrade"),
    "unknown": ("Connection: upgrade", "Upgrade: anything/9"),
}
HOST = "host: localhost"
JSON = "content-type: application/json"
FORM = (
    b'--B0UNDARY\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    b'--B0UNDARY\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n'
    b"Content-Type: image/png\r\n\r\n" + png("red", (8, 8)) + b"\r\n--B0UNDARY--\r\n"
)
MULTIPART = "content-type: multipart/form-data; boundary=B0UNDARY"
TEXT = raw.post(CHAT, HI).partition(b"\r\n\r\n")[2]


def chunked(body: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    half = len(body) // 2
    sizes = (body[:half], body[half:])
    return b"".join(
        (
            *(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in sizes),
            b"0\r\n%s\r\n" % trailer,
        )
    )


Request = tuple[tuple[str, ...], bytes, bool]
"""Method, path and headers; the body; whether its length is announced."""
REQUESTS: dict[str, Request] = {
    "a body of known length": (("POST", CHAT, JSON), TEXT, True),
    "a chunked body": (("POST", CHAT, JSON), chunked(TEXT), False),
    "extensions and trailers": (
        ("POST", CHAT, JSON),
        chunked(TEXT, b';name="a;b"', b"x: y\r\nupgrade: x\r\n"),
        False,
    ),
    "trailers about the connection": (
        ("POST", CHAT, JSON),
        chunked(TEXT, trailer=b"connection: upgrade, close\r\nupgrade: x\r\n"),
        False,
    ),
    "a stream": (("POST", CHAT, JSON), TEXT[:-1] + b',"stream":true}', True),
    "a message": (("POST", "/v1/messages", JSON), TEXT[:-1] + b',"max_tokens":9}', True),
    "an upload": (("POST", "/v1/files", MULTIPART), FORM, True),
    "a chunked upload": (("POST", "/v1/files", MULTIPART), chunked(FORM), False),
    "no JSON": (("POST", CHAT, JSON), b"{", True),
    "an empty body": (("POST", CHAT, JSON), b"", True),
    "no chunks": (("POST", CHAT, JSON), b"0\r\n\r\n", False),
    "a GET": (("GET", "/v1/models"), b"", True),
    "a HEAD": (("HEAD", "/v1/models"), b"", True),
}
ANSWERED_EARLY: dict[str, Request] = {
    "another type": (("POST", CHAT, "content-type: text/plain"), TEXT, True),
    "a GET with a body": (("GET", "/v1/models"), b"{}", True),
    "a path that is not there": (("POST", "/v1/nothing"), TEXT, True),
}
"""Answers that need no body end the connection unless it has come already."""


def build(name: str, *offer: str) -> bytes:
    (method, path, *lines), body, known = {**REQUESTS, **ANSWERED_EARLY}[name]
    framing = f"content-length: {len(body)}" if known else "transfer-encoding: chunked"
    return raw.head(method, path, *lines, *offer[:1], framing, *offer[1:]) + body


def read(connection: socket.socket, method: str = "GET") -> tuple[int, bytes]:
    answer = raw.read(connection, method)
    return answer.status, OWN.sub(b"-", answer.body)


def ask_twice(address: str, *pieces: bytes) -> list[tuple[int, bytes]]:
    """Send a request in pieces, with another behind it. Returns both answers."""
    method = pieces[0].split(b" ", 1)[0].decode()
    with raw.connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.01)
        connection.sendall(raw.head("GET", "/v1/models"))
        return [read(connection, method), read(connection)]


# ---- another protocol is offered


@pytest.mark.sparse
@pytest.mark.parametrize("name", REQUESTS)
def test_an_offered_upgrade_changes_no_answer(address: str, name: str) -> None:
    plain = build(name)
    expected = ask_twice(address, plain)
    assert expected[1][0] == 200
    for offer in OFFERS.values():
        request = build(name, *offer)
        head = request.index(b"\r\n\r\n") + 4
        assert ask_twice(address, request) == expected, "in one packet"
        assert ask_twice(address, request[:head], request[head:]) == expected, "body later"


@pytest.mark.sparse
@pytest.mark.parametrize("name", ANSWERED_EARLY)
def test_an_offered_upgrade_changes_no_early_answer(address: str, name: str) -> None:
    expected = raw.ask(address, build(name))
    for offer in OFFERS.values():
        answer = raw.ask(address, build(name, *offer))
        assert (answer.status, answer.body) == (expected.status, expected.body)


@pytest.mark.parametrize("name", ["a body of known length", "extensions and trailers"])
@pytest.mark.parametrize("via", ["server", pytest.param("router", marks=pytest.mark.slow)])
def test_an_offered_upgrade_may_be_cut_anywhere(
    addresses: dict[str, str], name: str, via: str
) -> None:
    address, request = addresses[via], build(name, *OFFERS["h2c"])
    (expected, _) = ask_twice(address, build(name))
    cuts = range(1, len(request))
    for start in range(0, len(cuts), 128):
        with ExitStack() as stack:
            opened = [
                (cut, stack.enter_context(raw.connect(address)))
                for cut in cuts[start : start + 128]
            ]
            for cut, connection in opened:
                connection.sendall(request[:cut])
            time.sleep(0.05)
            for cut, connection in opened:
                connection.sendall(request[cut:])
            for cut, connection in opened:
                assert read(connection) == expected, request[:cut][-40:]


def test_an_offered_upgrade_may_come_byte_by_byte(address: str) -> None:
    for name in ("a body of known length", "extensions and trailers"):
        request = build(name, *OFFERS["h2c"])
        with raw.connect(address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in request:
                connection.sendall(bytes([byte]))
            assert read(connection)[0] == 200


def test_requests_that_offer_an_upgrade_may_follow_each_other(address: str) -> None:
    names = [*REQUESTS]
    (expected, last) = zip(*(ask_twice(address, build(name)) for name in names), strict=True)
    together = b"".join(build(name, *OFFERS["h2c"]) for name in names)
    with raw.connect(address) as connection:
        connection.sendall(together + raw.head("GET", "/v1/models"))
        answers = [read(connection, REQUESTS[name][0][0]) for name in names]
        assert answers == [*expected] and read(connection) == last[0]


def test_a_client_that_offers_an_upgrade_may_wait_for_a_go_ahead(address: str) -> None:
    request = build("a body of known length", *OFFERS["h2c"], "expect: 100-continue")
    head, end, body = request.partition(b"\r\n\r\n")
    with raw.connect(address) as connection:
        connection.sendall(head + end)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read(connection)[0] == 200


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        ("content-length: 99\r\ntransfer-encoding: chunked", b"0\r\n\r\n"),
        ("transfer-encoding: chunked, identity", b"0\r\n\r\n"),
        ("transfer-encoding: chunked", b"xyz\r\n"),
        ("content-length: 1\r\ncontent-length: 2", b"xx"),
        ("content-length: -1", b"x"),
    ],
)
def test_an_offered_upgrade_opens_no_way_around_the_framing(
    address: str, framing: str, body: bytes
) -> None:
    for offer in ((), *OFFERS.values()):
        head = raw.head("POST", CHAT, JSON, *offer, framing)
        answer = raw.ask(address, head + body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
        assert answer.headers["connection"] == "close"


def test_a_tunnel_is_refused(address: str) -> None:
    for target in ("example.com:443", "/v1/models"):
        answer = raw.ask(address, raw.head("CONNECT", target, content_length=2) + b"{}")
        assert answer.status in (400, 405)


# ---- a slash at a path's end


@pytest.mark.parametrize("name", [*REQUESTS, *ANSWERED_EARLY])
@pytest.mark.sparse
def test_a_slash_at_a_paths_end_changes_no_answer(address: str, name: str) -> None:
    request = build(name, "x-forwarded-proto: https")
    expected = raw.ask(address, request)
    answer = raw.ask(address, request.replace(b" HTTP/1.1", b"/?a=b HTTP/1.1", 1))
    assert answer.status == expected.status and "location" not in answer.headers
    assert OWN.sub(b"-", answer.body) == OWN.sub(b"-", expected.body)


def test_no_route_redirects_to_another_scheme_or_host(
    addresses: dict[str, str], address: str
) -> None:
    paths = json.loads(raw.ask(addresses["server"], raw.head("GET", "/openapi.json")).body)["paths"]
    for path in (*paths, "/", "/docs", "/health", "/metrics", "/nothing"):
        for method in ("GET", "PUT", *(["POST"] if path.startswith("/v1/") else [])):
            plain, slashed = (
                raw.ask(address, raw.head(method, path + end, content_length=0))
                for end in ("", "/")
            )
            if slashed.status == 307:
                assert (path, method, slashed.headers["location"]) == ("/docs", "GET", "../docs")
            else:
                assert slashed.status == plain.status, (method, path)


# ---- HTTP/1.0


def old(request: bytes) -> bytes:
    return request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


def receive(address: str, request: bytes) -> tuple[bytes, bytes]:
    """All that comes until the connection ends: head and body."""
    with raw.connect(address) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


STREAMS: dict[str, dict[str, Any]] = {
    CHAT: HI,
    "/v1/completions": {"model": "demo", "prompt": "Hi"},
    "/v1/responses": {"model": "demo", "input": "Hi"},
    "/v1/messages": {**HI, "max_tokens": 9},
}


@pytest.mark.sparse
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_to_an_old_client_has_no_chunks_and_ends_with_its_connection(
    address: str, path: str
) -> None:
    request = raw.post(path, {**STREAMS[path], "stream": True})
    head, body = receive(address, old(request))
    assert head.startswith(b"http/1.1 200") and b"transfer-encoding" not in head
    assert b"content-length" not in head and b"connection: close" in head
    expected = raw.ask(address, request)
    names = re.compile(rb'"(id|item_id|response_id|sequence_number|created_at)":("[^"]*"|\d+)')
    assert len(names.sub(b"", OWN.sub(b"-", body)).split(b"\n\n")) == len(
        names.sub(b"", OWN.sub(b"-", expected.body)).split(b"\n\n")
    )
    assert body.startswith((b"data: {", b"event: ")) and body.endswith(b"\n\n")


@pytest.mark.sparse
@pytest.mark.parametrize("name", ["a body of known length", "a GET", "a HEAD", "no JSON"])
def test_a_whole_answer_to_an_old_client_has_its_length(address: str, name: str) -> None:
    request = build(name)
    expected = raw.ask(address, request)
    for wish in (b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"):
        head, body = receive(address, old(request).replace(b"\r\n", b"\r\n" + wish, 1))
        assert head.startswith(b"http/1.1 %d" % expected.status)
        assert b"transfer-encoding" not in head and b"content-length: " in head
        assert OWN.sub(b"-", body) == OWN.sub(b"-", expected.body)
