"""Clients that leave, engines that die, servers that are full, locked or told to stop: every
request ends, and says how.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from http.client import HTTPResponse
from typing import Any

import anthropic
import httpx
import openai
import pytest

from saccade.core.errors import StartupError
from saccade.core.options import ConnectionOptions, ServerOptions
from saccade.edge.http_server import listen
from saccade.text.prompt.template import Tokenizer
from saccade_bench.attacks import raw
from tests.helpers.asking import BODY, HI, Asking, eventually, held, in_flight
from tests.helpers.served import FOLDER, Served, its_own, serving


@pytest.fixture
def paused(served: Served) -> Iterator[Served]:
    """The engine stops after two tokens of every answer."""
    served.engine.paused = True
    yield served
    served.engine.paused = False
    eventually(lambda: in_flight(served) == 0)


# ---- clients that leave


def test_a_client_that_leaves_a_stream_frees_its_request(paused: Served) -> None:
    with paused.http.stream(
        "POST", "/v1/chat/completions", json={**BODY, "stream": True, "n": 2}
    ) as response:
        assert next(response.iter_lines()).startswith("data: ")
    eventually(lambda: len(paused.engine.aborted) == 2)
    eventually(lambda: in_flight(paused) == 0)


def test_a_client_that_leaves_before_its_answer_frees_its_request(paused: Served) -> None:
    aborts = paused.front.metrics.value("saccade_requests_total", outcome="abort")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{paused.address}/v1/chat/completions", json=BODY, timeout=0.3)
    eventually(lambda: len(paused.engine.aborted) == 1)
    eventually(lambda: in_flight(paused) == 0)
    assert paused.front.metrics.value("saccade_requests_total", outcome="abort") == aborts + 1


@pytest.mark.more
def test_a_stream_that_nobody_reads_frees_its_request() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",))
    with serving(options, ConnectionOptions(write_timeout=0.5)) as served:
        served.engine.reply = lambda request: [20] * 600
        body = {**BODY, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        with raw.connect(served.address, receive_buffer=4096) as connection:
            connection.sendall(raw.post("/v1/chat/completions", {**body, "max_tokens": 480}))
            eventually(lambda: in_flight(served) == 1)
            eventually(lambda: in_flight(served) == 0)
        closed = "saccade_connections_closed_total"
        assert served.front.metrics.value(closed, reason="unread") == 1


def test_a_stream_that_is_read_slowly_goes_on() -> None:
    """Slower than it comes, but never with a pause as long as the limit."""
    options = ServerOptions(port=0, served_model_name=("demo",))
    with serving(options, ConnectionOptions(write_timeout=2)) as served:
        served.engine.reply = lambda request: [20] * 600
        body = {**BODY, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        with raw.connect(served.address, receive_buffer=65536) as connection:
            connection.sendall(raw.post("/v1/chat/completions", {**body, "max_tokens": 480}))
            tail = b""
            while not tail.endswith(b"0\r\n\r\n") and (piece := connection.recv(1 << 20)):
                tail = (tail + piece)[-100:]
                time.sleep(0.002)
        assert b"data: [DONE]" in tail and served.engine.aborted == []


def start_sending(served: Served) -> socket.socket:
    """A client that announces a body and never sends it."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        b"application/json\r\nContent-Length: 999\r\n\r\n{"
    )
    eventually(lambda: held(served) == 1)
    return connection


@its_own
def test_a_client_that_leaves_within_its_body_costs_nothing(served: Served) -> None:
    start_sending(served).close()
    eventually(lambda: held(served) == 0)
    assert served.engine.received == []


@its_own
def test_a_client_that_stops_sending_is_told_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.edge.body.BODY_PAUSE", 0.2)
    with start_sending(served) as connection:
        answer = HTTPResponse(connection)
        answer.begin()
        assert (
            answer.status == 408
            and b"the body arrives too slowly: 1 bytes in 0.2 seconds" in answer.read()
        )
    eventually(lambda: held(served) == 0)


@pytest.mark.more
def test_a_client_that_never_ends_its_body_does_not_hold_up_the_end() -> None:
    with (
        serving(edge=ConnectionOptions(shutdown_grace=0.1)) as served,
        start_sending(served),
    ):
        served.server.should_exit = True
        eventually(lambda: held(served) == 0)


# ---- engines that die


def test_the_engines_death_ends_every_request_at_once_and_shows_in_health() -> None:
    with serving() as served:
        served.engine.paused = True
        whole = Asking(served)
        with served.http.stream(
            "POST", "/v1/chat/completions", json={**BODY, "stream": True}
        ) as response:
            lines = response.iter_lines()
            assert (
                json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["role"]
                == "assistant"
            )
            eventually(lambda: in_flight(served) == 2)
            served.on_loop(served.engine.die)
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == (
            "server_error",
            "engine_unavailable",
        ) and "signal 9" in error["message"]
        assert (
            whole.result().status_code == 503
            and whole.result().json()["error"]["code"] == "engine_unavailable"
        )
        health = served.http.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "failed",
            "model": "demo",
            "reason": "the engine process was killed by signal 9",
        }
        with pytest.raises(openai.InternalServerError) as caught:
            served.openai.chat.completions.create(model="demo", messages=HI)
        assert caught.value.status_code == 503
        assert served.front.metrics.value("saccade_requests_total", outcome="error") == 2


def test_the_sdks_raise_what_ends_a_stream() -> None:
    with serving() as served:
        served.engine.paused = True
        stream = served.openai.chat.completions.create(model="demo", messages=HI, stream=True)
        next(stream)
        claude: Any = anthropic.Anthropic(api_key="x", base_url=served.address, max_retries=0)
        asked = {"model": "demo", "max_tokens": 9, "messages": HI}
        with claude, claude.messages.create(**asked, stream=True) as message:
            events = iter(message)
            next(events)
            served.on_loop(served.engine.die)
            with pytest.raises(openai.APIError, match="signal 9"):
                list(stream)
            with pytest.raises(anthropic.APIStatusError, match="signal 9") as broken:
                list(events)
            with pytest.raises(anthropic.APIStatusError) as dead:
                claude.messages.create(**asked)
        assert broken.value.type == dead.value.type == "overloaded_error"
        assert dead.value.status_code == 529


# ---- servers that are full or locked


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """One request at a time, with a key, small bodies, one browser origin."""
    limits: dict[str, Any] = {"max_body_mb": 1, "max_queued_requests": 1}
    with serving(
        ServerOptions(
            port=0,
            api_key="sécret",
            served_model_name=("demo",),
            cors_origins=("http://page.example",),
            **limits,
        )
    ) as served:
        yield served


AUTHORISED: dict[str, Any] = {"authorization": "Bearer sécret".encode()}


@pytest.mark.more
def test_without_the_key_only_health_and_version_answer(strict: Served) -> None:
    headers: tuple[dict[str, Any], ...] = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "sécret".encode()},
    )
    for header in headers:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/nothing"),
        ):
            response = strict.http.request(method, path, headers=header)
            assert (
                response.status_code == 401
                and response.json()["error"]["code"] == "invalid_api_key"
            )
    assert strict.http.get("/health").status_code == strict.http.get("/version").status_code == 200
    assert strict.http.get("/v1/models", headers=AUTHORISED).status_code == 200


def test_named_origins_may_call_and_others_may_not(strict: Served) -> None:
    def preflight(origin: str) -> httpx.Response:
        ask = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        return strict.http.options("/v1/chat/completions", headers=ask)

    assert (
        preflight("http://page.example").headers["access-control-allow-origin"]
        == "http://page.example"
    )
    assert "access-control-allow-origin" not in preflight("http://evil.example").headers
    answer = strict.http.post(
        "/v1/chat/completions", json=BODY, headers={**AUTHORISED, "origin": b"http://page.example"}
    )
    assert (
        answer.status_code == 200
        and answer.headers["access-control-allow-origin"] == "http://page.example"
    )


@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
def test_a_body_over_the_limit_is_a_413(strict: Served, announced: bool) -> None:
    body = b" " * ((1 << 20) + 1)
    content = body if announced else iter([body[:1000], body[1000:]])
    response = strict.http.post(
        "/v1/chat/completions",
        content=content,
        headers={**AUTHORISED, "content-type": b"application/json"},
    )
    assert response.status_code == 413 and response.json()["error"]["code"] == "too_large"
    assert "--max-body-mb" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
)
def test_a_413_names_the_limit_that_was_passed(strict: Served, path: str) -> None:
    body = b'{"x": "%s"}' % bytes(70_000)
    answer = strict.http.post(
        path, content=body, headers={**AUTHORISED, "content-type": b"application/json"}
    )
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert message == "the body is larger than 64 KiB, the limit of this endpoint"


def test_a_full_server_says_when_to_come_back(strict: Served) -> None:
    strict.engine.paused = True
    url = f"{strict.address}/v1/chat/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, headers=AUTHORISED) as response:
        assert response.status_code == 200
        refused = strict.http.post("/v1/chat/completions", json=BODY, headers=AUTHORISED)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
    strict.engine.paused = False
    eventually(lambda: in_flight(strict) == 0)
    assert (
        strict.http.post("/v1/chat/completions", json=BODY, headers=AUTHORISED).status_code == 200
    )


# ---- servers that start


def test_the_first_chat_of_a_ready_server_reads_no_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large one, that takes half as long as the answer of a chat whose prompt is cached."""
    threads = []

    class Watched(Tokenizer):
        @cached_property
        def longest_token(self) -> int:
            threads.append(threading.current_thread().name)
            return max(map(len, self.backend.get_vocab()))

    monkeypatch.setattr("tests.helpers.served.TOKENIZER", Watched.load(FOLDER))
    with serving() as served:
        assert len(threads) == 1, "read before it is ready"
        assert "reader" in threads[0], "and not on the event loop"
        assert served.http.post("/v1/chat/completions", json=BODY).is_success
    assert len(threads) == 1


# ---- servers that are told to stop


def test_a_stopping_server_finishes_what_runs_and_takes_nothing_new() -> None:
    with serving() as served:
        served.engine.paused = True
        running = Asking(served)
        eventually(lambda: in_flight(served) == 1)
        served.server.should_exit = True
        eventually(lambda: served.front.state == "stopping")
        served.engine.paused = False
        assert running.result().status_code == 200
        assert running.result().json()["choices"][0]["message"]["content"] == "Hello!"
    assert served.engine.grace is not None


@pytest.mark.more
@pytest.mark.parametrize("stream", [False, True])
def test_what_outlasts_the_grace_time_ends_with_an_error(stream: bool) -> None:
    with serving(edge=ConnectionOptions(shutdown_grace=0.2)) as served:
        served.engine.paused = True
        running = Asking(served, stream=stream)
        eventually(lambda: len(served.engine.received) == 1)
        time.sleep(0.1)  # the first tokens are out
        served.server.should_exit = True
        response = running.result()
        if stream:
            last = [line for line in response.text.splitlines() if line][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert error["code"] == "engine_unavailable" and "shutting down" in error["message"]
        assert len(served.engine.aborted) == 1


def test_a_second_signal_does_not_wait() -> None:
    with serving() as served:
        served.engine.paused = True
        running = Asking(served)
        eventually(lambda: in_flight(served) == 1)
        served.server.should_exit = True
        eventually(lambda: served.front.state == "stopping")
        assert in_flight(served) == 1
        served.server.force_exit = True
        assert running.result().status_code == 503


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "from outside")
    with serving() as served:
        assert served.http.get("/v1/models").status_code == 401
        assert (
            served.http.get(
                "/v1/models", headers={"authorization": "Bearer from outside"}
            ).status_code
            == 200
        )


# ---- our own bugs


@pytest.mark.first
@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("127.0.0.1", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", "secret", 0)],
)
def test_a_server_that_is_open_to_the_network_without_a_key_is_warned_of(
    host: str, key: str | None, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(ServerOptions(host=host, port=0, api_key=key, served_model_name=("demo",))):
        assert [record.levelname for record in caplog.records if "--api-key" in record.message] == [
            "WARNING"
        ] * warned


def test_a_bug_in_the_news_ends_every_request_instead_of_leaving_it_hanging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as served:
        served.engine.paused = True
        running = Asking(served)
        eventually(lambda: in_flight(served) == 1)
        served.on_loop(served.engine.say_nonsense)
        assert running.result().status_code == 503
        assert served.http.get("/health").json()["status"] == "failed"
    assert "the front end failed" in caplog.text


def test_a_bug_in_one_answers_text_ends_that_answer_only(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.reply = lambda request: ["no token"] if request.sampling.seed == 1 else [20]  # type: ignore[list-item]
    broken = served.http.post("/v1/chat/completions", json={**BODY, "seed": 1})
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "internal_error")
    assert served.http.post("/v1/chat/completions", json={**BODY, "seed": 2}).status_code == 200
    assert "an answer failed" in caplog.text


def test_a_bug_in_an_answer_is_a_500_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        monkeypatch.setattr(served.front, "vocabulary", None)
        response = served.http.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "internal error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert served.http.get("/health").status_code == 200
