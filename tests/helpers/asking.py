"""Requests of a served model that stay open, and what its metrics say of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx

from tests.helpers.served import Served

HI = [{"role": "user", "content": "Hi"}]
BODY = {"model": "demo", "messages": HI}


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)


def in_flight(served: Served) -> float:
    return served.front.metrics.value("saccade_requests_in_flight")


def held(served: Served) -> float:
    return served.front.metrics.value("saccade_request_bytes_buffered")


class Asking(threading.Thread):
    """A request on a thread of its own; `answer` is set when it has ended."""

    def __init__(self, served: Served, **body: object) -> None:
        super().__init__()
        self._url, self._body = f"{served.address}/v1/chat/completions", {**BODY, **body}
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self._url, json=self._body, timeout=30)

    def result(self) -> httpx.Response:
        self.join(30)
        return self.answer
