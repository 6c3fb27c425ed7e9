"""What affinity and a shared store are worth on two real servers, and what becomes of the store
when its writers are killed.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from saccade.core.config import DISK_BLOCK, MIB
from saccade.core.store import SUFFIX
from saccade_bench.fixtures.server import Server, routing, serving
from tests.e2e.fleets import KILLED, OPTIONS, Fleet, chat, chats, outcome, start
from tests.fixtures.tiny import picture
from tests.helpers.images import image_part, text_part, user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = 24


@pytest.fixture(params=["tiny", "demo"])
def model(request: pytest.FixtureRequest, folder: Path) -> str | Path:
    """A tiny checkpoint, and the built-in model."""
    return folder if request.param == "tiny" else "demo"


def encodes_per_image(fleet: Fleet, router: Server, seed: int) -> float:
    before = sum(fleet.encodes)
    chats(router.url, [picture(64, 64, seed=seed + number) for number in range(CHATS)])
    return (sum(fleet.encodes) - before) / CHATS


def test_encodes_per_image_with_affinity_without_and_with_a_shared_store(
    model: str | Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        fleet = start(model, tmp_path, stack, doomed=0)
        blind = stack.enter_context(routing(fleet.workers, tmp_path, "--affinity", "none"))
        with_affinity = encodes_per_image(fleet, fleet.router, 1000)
        without = encodes_per_image(fleet, blind, 2000)
    with ExitStack() as stack:
        store = ("--embedding-cache-shared", "--embedding-cache-dir", str(tmp_path / "store"))
        fleet = start(model, tmp_path, stack, *store, doomed=0)
        blind = stack.enter_context(routing(fleet.workers, tmp_path, "--affinity", "none"))
        with_store = encodes_per_image(fleet, blind, 3000)
        read = [each.metric("saccade_embedding_hits_total", tier="disk") for each in fleet.workers]
    print(
        f"\nencodes per image: {with_affinity:.2f} with affinity, {without:.2f} without, ", end=""
    )
    print(f"{with_store:.2f} with a shared store (read from it: {read})")
    assert with_affinity == 1 and with_store == 1
    assert 1.6 < without <= 2
    assert min(read) > 0


def test_a_server_that_is_killed_under_load(model: str | Path, tmp_path: Path) -> None:
    """24 chats go on in rounds while one server dies: every round ends in an answer or in a
    typed error, after which the chat goes on elsewhere.
    """
    with ExitStack() as stack:
        fleet = start(model, tmp_path, stack)
        client, doomed = stack.enter_context(fleet.client()), fleet.workers[-1]
        family = psutil.Process(doomed.process.pid).children(recursive=True)
        deaths: list[float] = []
        images = [picture(64, 64, seed=4000 + number) for number in range(CHATS)]

        def talk(number: int) -> list[str]:
            stream = number % 2 == 0
            ends = [outcome(client, images[number], stream, deaths) for _ in range(4)]
            chat(client, images[number], rounds=2)
            return ends

        with ThreadPoolExecutor(CHATS) as pool:
            talking = [pool.submit(talk, number) for number in range(CHATS)]
            deadline = time.monotonic() + 60
            while doomed.metric("saccade_requests_running") < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            deaths.append(time.monotonic())
            doomed.process.kill()
            ends = [end for each in talking for end in each.result(timeout=300)]
        print(f"\n{ends.count('answer')} answers, {ends.count('error')} typed errors")
        assert ends.count("answer") >= 4 * CHATS - CHATS
        encoded = fleet.workers[0].metric("saccade_images_encoded_total")
        assert encoded == CHATS, "every image once on the server that is left"
        assert not psutil.wait_procs(family, timeout=60)[1]


# ---- two writers of one store, killed now and then

IMAGES = 40
BUDGET = 1 * MIB
STORE = (*("--embedding-cache-shared", "--embedding-cache-device-mb", "0"),)
"""No embedding stays on the device, and no page: every request needs its image from the store."""


def sizes(store: Path) -> list[int]:
    found = []
    for path in store.glob("*/*"):
        try:
            found.append(-(-path.stat().st_size // DISK_BLOCK) * DISK_BLOCK)
        except FileNotFoundError:
            continue
    return found


@contextmanager
def writer(folder: Path, logs: Path, store: Path) -> Iterator[Server]:
    caches = (
        "--tune",
        "disable_radix_cache=true",
        *STORE,
        "--embedding-cache-dir",
        f"{store}:1MiB",
    )
    options = (*OPTIONS, *caches)
    with serving(folder, logs, *options, status=KILLED) as server:
        try:
            yield server
        finally:
            server.process.kill()


def question(pixels: np.ndarray) -> dict[str, Any]:
    messages = [user(image_part(pixels), text_part("what?"))]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}


def say(http: httpx.Client, url: str, body: dict[str, Any]) -> str:
    answer = http.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.mark.parametrize(("count", "deaths"), [(2000, 4)])
def test_two_servers_write_one_store_and_are_killed_now_and_then(
    folder: Path, tmp_path: Path, http: httpx.Client, count: int, deaths: int
) -> None:
    side = 32 * 12
    images = [question(picture(side, side, seed=5000 + number)) for number in range(IMAGES)]
    with serving(folder, tmp_path, *OPTIONS) as alone:
        right = [say(http, alone.url, body) for body in images]
    assert len(set(right)) > 1
    chance, store = random.Random(0), tmp_path / "store"
    most, hits, encoded = 0, 0.0, 0.0
    for _ in range(deaths):
        with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
            contexts = [writer(folder, tmp_path, store) for _ in range(2)]
            servers = list(pool.map(stack.enter_context, contexts))

            def visit(number: int) -> bool:
                url = servers[number % 2].url  # noqa: B023 - used within the loop
                image = int(chance.paretovariate(0.7)) % IMAGES
                return say(http, url, images[image]) == right[image]

            for start in range(0, count // deaths, 50):
                assert all(pool.map(visit, range(start, start + 50)))
                most = max(most, sum(sizes(store)))
            for server in servers:
                hits += server.metric("saccade_embedding_hits_total", tier="disk")
                encoded += server.metric("saccade_images_encoded_total")
            dying = [pool.submit(say, http, servers[i % 2].url, images[i]) for i in range(20)]
            time.sleep(chance.uniform(0.0, 0.1))
            for server in servers:
                server.process.send_signal(signal.SIGKILL)
            for each in dying:
                each.exception(timeout=60)
    print(
        f"\n{count} requests, {deaths} x 2 kills: {hits:.0f} read, {encoded:.0f} encoded, ", end=""
    )
    files = sizes(store)
    print(f"{len(files)} files of {files[0]} bytes, {most} bytes at most")
    assert most <= BUDGET + DISK_BLOCK * 16, "what was renamed while we looked counts twice"
    with ExitStack() as stack:
        last = stack.enter_context(writer(folder, tmp_path, store))
        assert sum(sizes(store)) <= BUDGET
        assert {path.suffix for path in store.glob("*/*")} == {SUFFIX}, "no draft is left"
        for body, wanted in zip(images, right, strict=True):
            assert say(http, last.url, body) == wanted
        assert "damaged" not in last.log.read_text() and "is removed" not in last.log.read_text()
        assert httpx.get(f"{last.url}/health").is_success
