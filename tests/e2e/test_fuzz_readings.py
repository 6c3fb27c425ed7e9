"""Whatever embeddings, ranks and decisions are asked about: an answer that is no 5xx, and caches
that hold nothing of it afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from saccade_bench.attacks.watch import watching
from saccade_bench.fixtures.server import Server, serving
from tests.abuse.readings import PATHS, Readings
from tests.e2e.test_fuzz import AT_ONCE, HEALTH_SECONDS, outcome

pytestmark = pytest.mark.more

FLAGS = ("--dtype", "float32", "--context-length", "2048", "--tune", "fetch_timeout=1")


@pytest.fixture(scope="module", params=PATHS)
def asked(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Server]]:
    """What a server can do, and the server."""
    kind = request.param
    folder = checkpoint("qwen3_vl", **({} if kind == "decide" else {"pooling": kind}))
    with serving(folder, tmp_path_factory.mktemp(kind), *FLAGS) as server:
        yield kind, server


def fuzz(server: Server, kind: str, seed: int, count: int) -> None:
    requests = list(Readings(seed, kind).requests(count))
    with watching(server.process.pid, server.url) as cost, ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(lambda request: outcome(server, request), requests))
    broken = [
        (found, request)
        for found, request in zip(outcomes, requests, strict=True)
        if found.startswith("5") or found == "closed"
    ]
    assert not broken, f"{Counter(outcomes)}; the first: {broken[:3]}"
    assert "Traceback" not in server.log.read_text()
    assert cost.failures == 0 and cost.health < HEALTH_SECONDS
    # It must reach the work, on every path, or it proves nothing.
    for path in PATHS[kind]:
        here = [
            o for o, r in zip(outcomes, requests, strict=True) if r.split(b" ")[1] == path.encode()
        ]
        assert here.count("200") > len(here) // 4, (path, Counter(here))
    server.wait_for_metric("saccade_requests_in_flight", 0)
    server.wait_for_metric("saccade_request_bytes_held", 0)


def test_nothing_that_is_asked_breaks_a_server(asked: tuple[str, Server]) -> None:
    kind, server = asked
    fuzz(server, kind, seed=1, count=300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_of_thirty_thousand_requests_breaks_a_server(asked: tuple[str, Server]) -> None:
    kind, server = asked
    for seed in range(2, 22):
        fuzz(server, kind, seed, 500)


def test_a_seed_always_draws_the_same() -> None:
    for kind in PATHS:
        assert list(Readings(7, kind).requests(50)) == list(Readings(7, kind).requests(50))
