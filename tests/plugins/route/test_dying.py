"""Workers that die at every place of an answer, before a real router: they do nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from saccade_bench.fixtures.server import Server, routing

EVENT = b'data: {"n": 1}\n\n'
CHAT = "/v1/chat/completions"
WHOLE = b'{"whole": true}'


class _Worker(BaseHTTPRequestHandler):
    """What it does with a request is told by the request: `first` is done by whoever gets it first,
    `then` by the next.
    """

    protocol_version = "HTTP/1.1"
    seen: list[str]

    def do_GET(self) -> None:
        self._send(b'{"status": "ready"}')

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(self.headers["x-request-id"])
        match told["then" if len(self.seen) > 1 else "first"]:
            case "answer":
                self._send(WHOLE)
            case "die":
                self.close_connection = True
            case "nonsense":
                self.wfile.write(b"nonsense\r\n\r\n")
                self.close_connection = True
            case "half a head":
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-le")
                self.close_connection = True
            case "half an answer":
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n" + WHOLE[:7])
                self.close_connection = True
            case "half a stream":
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                body = b"%x\r\n%s\r\n" % (len(EVENT) + 6, EVENT + b"data: ")
                self.wfile.write(head + b"transfer-encoding: chunked\r\n\r\n" + body)
                self.close_connection = True
            case "unavailable":
                self._send(b"{}", 503)

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def working(folder: Path, handler: type[_Worker]) -> Iterator[Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield Server(f"http://127.0.0.1:{server.server_port}", None, folder)  # type: ignore[arg-type]
        server.shutdown()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[str]]]:
    """In front of two workers, and who was asked."""
    folder, seen = tmp_path_factory.mktemp("log"), list[str]()
    handler = type("_Counted", (_Worker,), {"seen": seen})
    with ExitStack() as stack:
        workers = [stack.enter_context(working(folder, handler)) for _ in range(2)]
        yield stack.enter_context(routing(workers, folder)), seen


def ready(router: Server) -> None:
    """Wait until both workers are asked again."""
    for worker in httpx.get(f"{router.url}/health").json()["workers"]:
        router.wait_for_metric("saccade_route_ready", 1, worker=worker["url"])


@pytest.mark.first
@pytest.mark.parametrize(
    ("path", "first", "then", "asked", "status"),
    [
        (CHAT, "answer", "", {1}, 200),
        (CHAT, "die", "answer", {2}, 200),
        (CHAT, "nonsense", "answer", {2}, 200),
        (CHAT, "half a head", "answer", {2}, 200),
        (CHAT, "unavailable", "", {1}, 503),
        (CHAT, "die", "die", {2, 3}, 502),  # 3 where the first connection was one of before
        ("/v1/messages", "die", "die", {2, 3}, 502),
    ],
)
def test_who_dies_before_a_byte_of_an_answer_is_replaced_once(
    router: tuple[Server, list[str]], path: str, first: str, then: str, asked: set[int], status: int
) -> None:
    server, seen = router
    ready(server)
    seen.clear()
    answer = httpx.post(
        server.url + path, json={"first": first, "then": then}, headers={"x-request-id": "mine"}
    )
    assert answer.status_code == status
    assert len(seen) in asked
    assert set(seen) == {"mine"}
    assert answer.headers["x-request-id"] == "mine"
    if status == 200:
        assert answer.content == WHOLE
    if status == 502:
        error = answer.json()["error"]
        assert "worker_lost" in (error.get("code"), error.get("details", {}).get("error_code"))


@pytest.mark.first
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_a_stream_that_breaks_off_says_so_in_its_last_event(
    router: tuple[Server, list[str]], path: str
) -> None:
    server, seen = router
    ready(server)
    seen.clear()
    text = httpx.post(server.url + path, json={"first": "half a stream"}).text
    whole, rest = text[: len(EVENT)], text[len(EVENT) :]
    assert whole.encode() == EVENT, "what was whole has come, and no half event"
    *_, last = rest.strip().splitlines()
    assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith(
        "the worker disconnected"
    )
    assert len(seen) == 1, "what has begun is not begun again"


def test_an_answer_that_breaks_off_is_a_broken_connection(
    router: tuple[Server, list[str]],
) -> None:
    server, seen = router
    ready(server)
    seen.clear()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(server.url + CHAT, json={"first": "half an answer"})
    assert len(seen) == 1
