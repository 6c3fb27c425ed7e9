"""Whatever is sent to whatever route a server describes: an answer that is no 5xx, work that is
reached on every route, and a server that answers as before.

    python -m pytest tests/e2e/test_fuzz_routes.py -m slow -s       # 30,000 requests, with a table
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.api.operations import EXAMPLE_CHAT
from saccade_bench.attacks import raw
from saccade_bench.attacks.watch import watching
from saccade_bench.fixtures.server import Server, serving
from tests.abuse.readings import PICTURES
from tests.abuse.routes import Requests, Route, routes_of, upload
from tests.e2e.test_fuzz import AT_ONCE, HEALTH_SECONDS, outcome

pytestmark = pytest.mark.more

SECONDS = 120
"""Of one answer, at most: on a machine that does much else."""
OPTIONS = ("--context-length", "1024", "--tune", "fetch_timeout=1")
READS = frozenset({"/v1/embeddings", "/v2/embed"})
RANKS = frozenset({"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"})
ROUND = 500
TOTAL = {"answers": 24_000, "ranks": 6_000}
"""Requests of the long test, by what the server can do."""


@pytest.fixture(scope="module", params=TOTAL)
def asked(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Server]]:
    """What a server can do, and the server: the demo model, and one that ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    files = ("--files-dir", str(folder / "files"))
    if request.param == "answers":
        with serving("demo", folder, *OPTIONS, *files, "--pooling", "last") as server:
            yield "answers", server
    else:
        ranker = checkpoint("qwen3_vl", pooling="rank")
        with serving(ranker, folder, *OPTIONS, *files, "--dtype", "float32") as server:
            yield "ranks", server


def routes(server: Server, kind: str) -> list[Route]:
    """The routes that this server's model can answer."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=SECONDS).raise_for_status().json()
    lacking = RANKS if kind == "answers" else READS
    return [route for route in routes_of(document) if route.path not in lacking]


def ids(server: Server) -> dict[str, list[str]]:
    """Make files, batches and responses, and return their ids by path."""
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:

        def made(path: str, **sent: Any) -> str:
            return str(client.post(path, **sent).raise_for_status().json()["id"])

        def uploaded(data: bytes, purpose: str) -> str:
            kind, form = upload(data, purpose)
            return made("/v1/files", content=form, headers={"content-type": kind})

        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        hi = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        lines = [
            json.dumps(
                {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": hi}
            )
            for id in "ab"
        ]
        pictures = [base64.b64decode(url.partition(",")[2]) for url in PICTURES]
        inputs = [uploaded("\n".join(lines).encode(), "batch") for _ in range(2)]
        window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return {
            "/v1/models": [model],
            "/v1/files": [uploaded(each, "vision") for each in pictures * 2],
            "batch inputs": inputs,
            "/v1/batches": [
                made("/v1/batches", json={"input_file_id": each, **window}) for each in inputs
            ],
            "/v1/responses": [
                made("/v1/responses", json={"input": "Hi", "max_output_tokens": 2})
                for _ in range(8)
            ],
        }


def colour(server: Server) -> str:
    """What the model says about a red square."""
    body = {"messages": EXAMPLE_CHAT, "max_tokens": 9, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def fuzz(server: Server, kind: str, seed: int, count: int) -> Counter[tuple[str, str]]:
    """Send a valid request to each route, then `count` drawn ones. Return the outcomes by route."""
    drawn = Requests(seed, routes(server, kind), ids(server))
    found: Counter[tuple[str, str]] = Counter()
    for route, request in drawn.valid():
        answer = raw.ask(server.url, request, timeout=SECONDS)
        assert answer.status == 200, (route.name, answer.status, answer.body[:300])
        found[route.name, "200"] += 1
    sent = list(drawn.requests(count))
    with watching(server.process.pid, server.url) as cost, ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(lambda each: outcome(server, each[1]), sent))
    found.update((route.name, each) for (route, _), each in zip(sent, outcomes, strict=True))
    broken = [
        (each, request)
        for (_, request), each in zip(sent, outcomes, strict=True)
        if each.startswith("5") or each == "closed"
    ]
    assert not broken, f"{len(broken)} of {Counter(outcomes)}; the first: {broken[:3]}"
    assert outcomes.count("200") > count // 3, Counter(outcomes)
    assert cost.failures == 0 and cost.health < HEALTH_SECONDS
    return found


def fuzz_in_rounds(server: Server, kind: str, seed: int, count: int) -> Counter[tuple[str, str]]:
    before, found = colour(server), Counter[tuple[str, str]]()
    assert kind != "answers" or "red" in before
    for start in range(0, count, ROUND):
        found += fuzz(server, kind, seed + start, min(ROUND, count - start))
    assert server.process.poll() is None and "Traceback" not in server.log.read_text()
    server.wait_for_metric("saccade_requests_in_flight", 0)
    server.wait_for_metric("saccade_request_bytes_buffered", 0)
    assert colour(server) == before
    return found


@pytest.mark.timeout(1200)
def test_nothing_that_is_sent_to_any_route_breaks_a_server(asked: tuple[str, Server]) -> None:
    kind, server = asked
    found = fuzz_in_rounds(server, kind, seed=1, count=150)
    assert {route.name for route in routes(server, kind)} == {name for name, _ in found}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_of_thirty_thousand_requests_breaks_a_server(asked: tuple[str, Server]) -> None:
    kind, server = asked
    found = fuzz_in_rounds(server, kind, seed=1000, count=TOTAL[kind])
    for name in sorted({name for name, _ in found}):
        statuses = {status: count for (each, status), count in found.items() if each == name}
        print(f"{name:40} {statuses}")
        assert statuses["200"] > 0, name


def test_a_seed_always_draws_the_same() -> None:
    places = [Route("POST", "/v1/score", {"text_1": "a", "text_2": ["b"]}, False)]
    places += [Route("GET", "/v1/files/{id}", None, False), Route("POST", "/v1/files", None, True)]
    known = {"/v1/models": ["demo"], "/v1/files": ["a", "b"]}
    first, again = (list(Requests(7, places, known).requests(50)) for _ in range(2))
    assert first == again
