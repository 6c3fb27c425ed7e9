"""Hostile and clumsy clients of a real server process, or of a router in front of one: connections,
heads, bodies and answers that nobody reads cost a bounded amount, and /health answers throughout.
"""

from __future__ import annotations

import gc
import resource
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import psutil
import pytest

from saccade_bench.attacks import raw
from saccade_bench.fixtures.server import Server, routing, serving
from tests.e2e.ways import WAYS

pytestmark = pytest.mark.more

CHAT = "/v1/chat/completions"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
KEY = "the-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
PAGE = "https://page.example"
MOST = 48
SOON = 15
"""Seconds that tell a hang from an answer; the server's own clocks are set to one and two."""


@pytest.fixture(scope="module", params=WAYS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Short clocks, few connections, a key; started with a low limit of open files. Routed: the
    router's are those, and its process is what is looked at.
    """
    folder = tmp_path_factory.mktemp("edge")
    seconds = {"header_timeout": 1, "keep_alive_timeout": 1, "write_timeout": 1, "body_timeout": 2}
    clocks = [word for name, told in seconds.items() for word in ("--tune", f"{name}={told}")]
    few = ("--tune", f"max_connections={MOST}", "--tune", f"max_connections_per_address={MOST}")
    edge = (*clocks, *few, "--cors-origins", PAGE)
    own = ("--api-key", KEY, "--metrics-without-key", "--files-dir", str(folder / "files"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()  # what tests before this one hold open counts too
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        server = stack.enter_context(serving("demo", folder, *edge, *own))
        if request.param == "routed":
            # It knows no key: what it takes of a body is its own bound.
            server = stack.enter_context(routing([server], folder, *edge, "--max-body-mb", "64"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield server
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(autouse=True)
def answers_throughout(server: Server) -> Iterator[None]:
    yield
    assert httpx.get(f"{server.url}/health", timeout=SOON).is_success


def front_mb(server: Server) -> float:
    return psutil.Process(server.process.pid).memory_info().rss / 1e6


def get(path: str, *lines: str) -> bytes:
    return raw.head("GET", path, *lines, authorization=WITH_KEY["authorization"])


# ---- one request after another


def test_requests_that_come_together_are_answered_in_turn(server: Server) -> None:
    chunked = raw.head(
        "POST",
        CHAT,
        "transfer-encoding: chunked",
        authorization=f"Bearer {KEY}",
        content_type="application/json",
    )
    with raw.connect(server.url) as connection:
        body = b"4\r\n\r\n\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n"
        connection.sendall(get("/version") + chunked + body + get("/v1/models") + get("/none"))
        assert raw.read(connection).body.startswith(b'{"version"')
        refused = raw.read(connection)
        assert (refused.status, refused.error["code"]) == (400, "missing_required_parameter")
        assert raw.read(connection).status == 200
        assert raw.read(connection).status == 404


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_request_may_come_in_any_pieces(server: Server, size: int) -> None:
    request = raw.post(CHAT, HELLO, **WITH_KEY)
    with raw.connect(server.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(request), size):
            connection.sendall(request[at : at + size])
        assert raw.read(connection).status == 200


def test_pipelined_requests_are_not_kept(server: Server) -> None:
    before = front_mb(server)
    with raw.connections(server.url, 32) as sockets:
        taken = raw.flood(sockets, raw.head("GET", "/v1/models"), 40_000, 20, patience=2)
        assert taken > 10_000_000
        until, most = time.monotonic() + 1.5, before
        while time.monotonic() < until:
            assert httpx.get(f"{server.url}/health", timeout=SOON).is_success
            most = max(most, front_mb(server))
    assert most - before < 60


# ---- heads


@pytest.mark.parametrize(
    "start",
    [b"GET /", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"GET /health HTTP/1.1\r\n"],
    ids=["path", "value", "name"],
)
def test_a_head_has_a_limit(server: Server, start: bytes) -> None:
    before = front_mb(server)
    with raw.connect(server.url) as connection:
        connection.sendall(start)
        with suppress(OSError):
            connection.sendall(b"a" * 8_000_000)
        answer = raw.read(connection)
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
        assert answer.headers["connection"] == "close"
    assert front_mb(server) - before < 20


@pytest.mark.parametrize("origin", ["https://page.example", "https://other.example"])
def test_answers_of_the_connection_itself_are_headed_as_any(server: Server, origin: str) -> None:
    """A page that is let in can read why, and every answer has a name."""
    named = raw.head("GET", "/health", f"origin: {origin}", "x-request-id: mine", *["a: b"] * 200)
    ordinary = raw.head("GET", "/nowhere", f"origin: {origin}", "x-request-id: mine", **WITH_KEY)
    refused, usual = raw.ask(server.url, named), raw.ask(server.url, ordinary)
    assert (refused.status, usual.status) == (431, 404)
    for name in ("x-request-id", "access-control-allow-origin", "vary"):
        assert refused.headers.get(name) == usual.headers.get(name)
    assert ("access-control-allow-origin" in refused.headers) == (origin == PAGE)
    unnamed = [raw.ask(server.url, b"\x00\r\n\r\n").headers["x-request-id"] for _ in range(2)]
    assert unnamed[0].startswith("req-") and unnamed[0] != unnamed[1]


def test_headers_have_a_limit(server: Server) -> None:
    answer = raw.ask(server.url, raw.head("GET", "/health", *["a: b"] * 200))
    assert (answer.status, answer.error["code"]) == (431, "head_too_large")
    assert raw.ask(server.url, raw.head("GET", "/health", *["a: b"] * 100)).status == 200


def test_what_frames_a_body_has_a_limit_too(server: Server) -> None:
    start = raw.head("POST", CHAT, "transfer-encoding: chunked", **WITH_KEY)
    for framing in (b"1;" + b"x" * 100_000, b"0\r\n" + b"a: b\r\n" * 20_000):
        answer = raw.ask(server.url, start + framing)
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
    answer = raw.ask(server.url, start + b"1\r\n \r\n" * 20_000)
    assert answer.status == 400 and "send larger chunks" in str(answer.error["message"])


def test_a_trailer_is_no_header(server: Server) -> None:
    start = raw.head("POST", CHAT, "transfer-encoding: chunked")
    answer = raw.ask(server.url, start + f"0\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
    assert answer.status == 401


@pytest.mark.parametrize(
    "request_",
    [
        raw.head("GET", "/health", "host: y"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\nhost: localhost\n\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        raw.head("POST", CHAT, "transfer-encoding: chunked", content_length=3),
        raw.head("POST", CHAT, content_length=-1),
        raw.head("GET", "/\xff"),
        raw.head("GET", "/health", host=""),
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/0.9\r\nhost: localhost\r\n\r\n",
        raw.head("POST", CHAT, "transfer-encoding: identity", "transfer-encoding: chunked"),
        raw.head("POST", CHAT, "transfer-encoding: chunked", "transfer-encoding: chunked"),
        raw.head("POST", CHAT, "transfer-encoding: gzip, chunked"),
    ],
    ids=[
        "two hosts",
        "TLS",
        "bare LF",
        "CONNECT",
        "two lengths",
        "negative",
        "not ASCII",
        "no host",
        "0.9, short",
        "0.9",
        "identity too",
        "chunked twice",
        "gzip",
    ],
)
def test_what_is_not_http_is_a_400_in_openais_shape(server: Server, request_: bytes) -> None:
    answer = raw.ask(server.url, request_)
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")


def test_connections_that_say_nothing_or_half_end(server: Server) -> None:
    count = "saccade_connections_closed_total"
    before = server.metric(count, reason="head")
    with raw.connections(server.url, 3) as (silent, half, idle):
        half.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        idle.sendall(raw.head("GET", "/health"))
        assert raw.read(idle).status == 200
        assert raw.read(half).status == 408
        assert all(raw.is_closed(each, SOON) for each in (silent, half, idle))
    assert server.metric(count, reason="head") == before + 2


# ---- many connections


def test_the_server_may_open_as_many_files_as_it_is_allowed(server: Server) -> None:
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard > 256


def test_idle_connections_make_room_for_others(server: Server) -> None:
    with raw.connections(server.url, 3 * MOST):
        assert raw.ask(server.url, get("/v1/models")).status == 200
    assert server.metric("saccade_connections_closed_total", reason="crowd") >= 2 * MOST


def test_health_answers_when_every_connection_is_in_use(server: Server) -> None:
    start = raw.head("POST", CHAT, **WITH_KEY, content_type="application/json", content_length=9)
    with raw.connections(server.url, MOST) as sockets:
        for each in sockets:
            each.sendall(start + b"{")
        deadline = time.monotonic() + SOON
        while (answer := raw.ask(server.url, get("/v1/models"))).status == 200:
            assert time.monotonic() < deadline
        assert answer.status == 429 and "max_connections" in str(answer.error["message"])
        assert answer.headers["retry-after"] == "1"
        assert raw.ask(server.url, raw.head("GET", "/health")).status == 200


# ---- bodies


def test_a_body_that_drips_is_a_408(server: Server) -> None:
    start = raw.head("POST", CHAT, **WITH_KEY, content_type="application/json", content_length=1000)
    with raw.connect(server.url) as connection:
        connection.sendall(start)
        deadline = time.monotonic() + SOON
        while not select.select([connection], [], [], 0.2)[0]:
            assert time.monotonic() < deadline
            connection.sendall(b" ")
        answer = raw.read(connection)
    assert answer.status == 408 and "--tune body_timeout" in str(answer.error["message"])


@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/nowhere"])
def test_a_client_that_sends_on_reads_its_refusal(server: Server, path: str) -> None:
    """urllib sends all of its body before it reads, and asks for the connection to be closed."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}{path}", data=b" " * 20_000_000, timeout=SOON)
    assert refused.value.code == 401
    refused.value.close()


def test_a_body_without_end_is_cut_off(server: Server) -> None:
    """At most twice the largest body is taken of one that was refused."""
    start = raw.head("POST", CHAT, "transfer-encoding: chunked")
    with raw.connections(server.url, 1) as sockets:
        sockets[0].sendall(start)
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        taken = raw.flood(sockets, piece, 16_000, 30, patience=2)
        assert taken < 600 << 20


def test_bodies_with_a_mark_or_an_encoding(server: Server) -> None:
    url = f"{server.url}{CHAT}"
    body = httpx.Request("POST", url, json=HELLO).content
    json = WITH_KEY | {"content-type": "application/json"}
    assert httpx.post(url, content=b"\xef\xbb\xbf" + body, headers=json).status_code == 200
    packed = httpx.post(url, content=body, headers=json | {"content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding" in packed.json()["error"]["message"]


def test_errors_do_not_repeat_what_was_sent_at_any_length(server: Server) -> None:
    long = "m" * 1_000_000
    for body in ({**HELLO, "model": long}, {**HELLO, long: 1}):
        answer = httpx.post(f"{server.url}{CHAT}", json=body, headers=WITH_KEY, timeout=SOON)
        assert answer.status_code in (400, 404) and len(answer.content) < 4000
    assert len(raw.ask(server.url, get("/" + "x" * 20_000)).body) < 1000


# ---- answers that nobody reads


def test_downloads_that_nobody_reads_cost_a_piece_each_and_end(server: Server) -> None:
    data = b"x" * 30_000_000
    uploaded = httpx.post(
        f"{server.url}/v1/files",
        data={"purpose": "evals"},
        files={"file": ("x", data)},
        headers=WITH_KEY,
        timeout=60,
    ).json()
    path = f"/v1/files/{uploaded['id']}/content"
    got = httpx.get(f"{server.url}{path}", headers=WITH_KEY, timeout=60)
    assert got.content == data
    before = front_mb(server)
    unread = server.metric("saccade_connections_closed_total", reason="unread")
    with raw.connections(server.url, 8, receive_buffer=4096) as sockets:
        for each in sockets:
            each.sendall(get(path))
        server.wait_for_metric("saccade_connections_closed_total", unread + 8, reason="unread")
        assert front_mb(server) - before < 60
    server.wait_for_metric("saccade_request_bytes_buffered", 0)


# ---- small things that clients expect


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"bearer {KEY}"}, {"authorization": f"BEARER  {KEY}"}, {"x-api-key": KEY}],
)
def test_the_key_may_come_as_clients_write_it(server: Server, headers: dict[str, str]) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    wrong = {name: value + "y" for name, value in headers.items()}
    assert httpx.get(f"{server.url}/v1/models", headers=wrong).status_code == 401


def test_what_needs_no_key(server: Server) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert httpx.get(f"{server.url}{path}").status_code == 200
    listed = httpx.get(f"{server.url}/v1/models/", headers=WITH_KEY).json()
    assert [model["id"] for model in listed["data"]] == ["demo"]


def test_every_answer_has_a_request_id(server: Server) -> None:
    def id_of(given: dict[str, str]) -> str:
        return httpx.get(f"{server.url}/v1/models", headers=given).headers["x-request-id"]

    assert id_of({"x-request-id": "mine-7"}) == "mine-7"
    assert id_of({}) != id_of({})
    for odd in ("x" * 200, "a b", "<script>"):
        assert id_of({"x-request-id": odd}).startswith("req-")
