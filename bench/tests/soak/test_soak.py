"""The soak test detects a wrong answer and an unexpected status, and measures this process."""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import Any

import httpx

from saccade_bench.soak.__main__ import Reference, Run
from saccade_bench.soak.kinds import KINDS, Kind, SoakClient, UnexpectedStatus, refuse
from saccade_bench.soak.memory import held_by


def right(asker: SoakClient, seed: int) -> Any:
    return seed


def wrong(asker: SoakClient, seed: int) -> Any:
    return asker.origin


def failing(asker: SoakClient, seed: int) -> Any:
    raise UnexpectedStatus("500")


def asker(origin: str) -> SoakClient:
    transport = httpx.MockTransport(lambda request: httpx.Response(200))
    return SoakClient(httpx.Client(transport=transport, base_url="http://server"), origin)


def test_each_request_is_counted_as_what_came_of_it() -> None:
    kinds = [Kind(right, 1, 5), Kind(wrong, 1, 0), Kind(failing, 1, 5)]
    run = Run(Reference(asker("cold")), kinds)
    thread = threading.Thread(target=run.work, args=(asker("warm"), 0))
    thread.start()
    for _ in count():
        counts = run.counts
        if counts.wrong and counts.failed and counts.compared["right"] > 5:
            break
    run.end()
    thread.join()
    assert {*counts.wrong} == {"wrong"} and {*counts.failed} == {"failing"}
    assert counts.compared["wrong"] < counts.asked["wrong"], "new requests are compared at times"
    assert any('"warm" not "cold"' in fault for fault in counts.faults)


def test_a_refusal_is_the_same_whatever_its_request_is_called() -> None:
    names = count()

    def answer(request: httpx.Request) -> httpx.Response:
        error = {"type": "error", "error": {"message": request.url.path}}
        return httpx.Response(400, json={**error, "request_id": f"req-{next(names)}"})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    refused = SoakClient(client, "warm")
    assert [refuse(refused, seed) for seed in range(20)] == [
        refuse(refused, seed) for seed in range(20)
    ]


def test_names_of_kinds_say_what_they_ask() -> None:
    assert len({(kind.ask, kind.pool > 0) for kind in KINDS}) == len(KINDS)


def test_a_process_is_seen_with_its_memory() -> None:
    held = held_by(os.getpid())["front"]
    assert held.processes == 1 and held.threads >= 1 and held.descriptors > 2
    assert held.rss >= held.pss > 0 and held.rss >= held.heap + held.anonymous > 0
