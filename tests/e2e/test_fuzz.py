"""Whatever is sent to whatever route: an answer that is no 5xx, or a closed connection, without a
traceback in the log; and /health all the while.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from saccade_bench.attacks import raw
from saccade_bench.attacks.watch import watching
from saccade_bench.fixtures.server import Server, routing
from tests.abuse import values
from tests.abuse.grammar import Grammar
from tests.e2e.ways import WAYS

pytestmark = pytest.mark.more

AT_ONCE = 6
HARD = True
"""Also what once broke the server."""
HEALTH_SECONDS = 10
"""Far more than /health ever takes, and far less than a front that hangs."""


@pytest.fixture(scope="module", params=WAYS)
def server(
    hurried: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "direct":
        yield hurried
        return
    clocks = ("--tune", "body_timeout=1", "--tune", "header_timeout=1")
    with routing([hurried], tmp_path_factory.mktemp("fuzz"), *clocks) as router:
        yield router


def outcome(server: Server, request: bytes) -> str:
    """The answer's status, or "closed". What is sent is all that is sent."""
    method = request.split(b" ", 1)[0].decode("latin-1")
    with raw.connect(server.url, timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(request)
        try:
            return str(raw.read(connection, method).status)
        except (ConnectionError, socket.gaierror):
            return "closed"


def fuzz(server: Server, seed: int, count: int) -> None:
    requests = list(Grammar(seed, hard=HARD).requests(count))
    with watching(server.process.pid, server.url) as cost, ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(lambda request: outcome(server, request), requests))
    broken = [
        (found, request)
        for found, request in zip(outcomes, requests, strict=True)
        if found.startswith("5")
    ]
    assert not broken, f"{Counter(outcomes)}; the first: {broken[:3]}"
    assert "Traceback" not in server.log.read_text()
    assert cost.failures == 0 and cost.health < HEALTH_SECONDS
    # It must reach the routes, or it proves nothing.
    assert min(outcomes.count("200"), outcomes.count("400")) > count // 20, Counter(outcomes)


def test_nothing_that_is_sent_breaks_the_server(server: Server) -> None:
    fuzz(server, seed=1, count=500)
    server.wait_for_metric("saccade_requests_in_flight", 0)
    server.wait_for_metric("saccade_request_bytes_buffered", 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_of_ten_thousand_requests_breaks_the_server(server: Server) -> None:
    for seed in range(2, 12):
        fuzz(server, seed, 1000)


def ask(server: Server, client: httpx.Client, case: tuple[str, values.Place, str, bytes]) -> str:
    """What is wrong with the answer to a case; empty: nothing."""
    route, place, name, body = case
    answer = client.post(server.url + route, content=body)
    if answer.status_code == 200:
        return ""
    error = answer.json()["error"]
    wrong = answer.status_code >= 500 or not (error["message"] and error["type"])
    if place and name in values.NUMBERS and not error["message"].count(str(place[0])):
        wrong = True  # the field has a name
    return f"{route} {place} {name}: {answer.status_code} {answer.text[:200]}" if wrong else ""


def try_values(server: Server, cases: list[tuple[str, values.Place, str, bytes]]) -> None:
    headers = {"content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=60) as client, ThreadPoolExecutor(2) as threads:
        wrong = [
            each for each in threads.map(lambda case: ask(server, client, case), cases) if each
        ]
    assert not wrong, wrong[:5]
    assert "Traceback" not in server.log.read_text()


def test_hostile_values_in_any_place_are_refused_by_name(server: Server) -> None:
    """A few of them, as the seed decides; the bodies themselves are right."""
    for route, body in values.BODIES:
        answer = httpx.post(server.url + route, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    try_values(server, random.Random(5).sample(list(values.cases()), 250))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_hostile_values_in_all_places_are_refused_by_name(server: Server) -> None:
    try_values(server, list(values.cases()))


def test_a_seed_always_draws_the_same() -> None:
    first, second = Grammar(7), Grammar(7)
    assert list(first.requests(50)) == list(second.requests(50))


def test_the_log_stays_short(server: Server, tmp_path: Path) -> None:
    """What clients do wrong is not worth a line each."""
    before = server.log.stat().st_size
    for _ in range(50):
        assert raw.ask(server.url, b"\x00\r\n\r\n").status == 400
    assert server.log.stat().st_size - before < 1000
