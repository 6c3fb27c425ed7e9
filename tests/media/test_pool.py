"""Decode workers may crash, hang and blow up: one job is hurt at most, nothing is left behind, and
the pool goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from saccade.core.arena import Arena
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.media.content import Probe, encode_array, probe
from saccade.media.pool import DecodePool, Job
from tests.media.conftest import MakePath
from tests.media.pictures import decoded, encode, noise, png

ROOT = Path(__file__).parent.parent.parent


def job(data: bytes, urgent: bool = True) -> Job:
    found = probe(data, 10**9)
    return Job(data, found, found.upright, urgent)


async def worker_process() -> psutil.Process:
    """The (only) worker of this process, once it exists."""
    while True:
        for child in psutil.Process().children():
            if "saccade.media.decode_worker" in child.cmdline():
                return child
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Each test's own; and no worker of a test before it is left, so that `worker_process` finds
    the right one.
    """
    assert not [
        child
        for child in psutil.Process().children()
        if "saccade.media.decode_worker" in child.cmdline()
    ]
    arena = Arena.create(128 << 20)
    yield arena
    arena.close()


def test_a_worker_killed_in_the_middle_is_replaced_and_the_picture_decoded(arena: Arena) -> None:
    async def scenario() -> None:
        metrics = Metrics()
        pool = DecodePool(arena, 1, 60.0, metrics)
        pool.start()
        data = encode(noise(256, 256))
        await pool.decode(job(data), 0)
        process = await worker_process()
        process.suspend()  # so that the job is surely under way
        retried = job(data)
        waiting = asyncio.create_task(pool.decode(retried, 4096))
        await until(lambda: retried.running)
        process.kill()
        await waiting
        np.testing.assert_array_equal(arena.view(PixelSlot(4096, 256, 256)), decoded(data))
        assert metrics.value("saccade_decode_worker_restarts_total") == 1
        await pool.close()
        assert not process.is_running()

    asyncio.run(scenario())


def test_a_picture_that_ends_every_worker_fails_alone(arena: Arena) -> None:
    async def scenario() -> None:
        metrics = Metrics()
        pool = DecodePool(arena, 1, 60.0, metrics)
        pool.start()
        deadly = job(encode(noise(64, 64)))
        waiting = asyncio.create_task(pool.decode(deadly, 0))
        for _ in range(2):
            await until(lambda: deadly.running)
            (await worker_process()).kill()
            await until(lambda: not deadly.running)
        with pytest.raises(ImageError, match="crashed"):
            await waiting
        await pool.decode(job(encode(noise(64, 64))), 0)
        assert metrics.value("saccade_decode_worker_restarts_total") == 2
        await pool.close()

    asyncio.run(scenario())


def test_a_hang_ends_at_the_time_limit_and_the_pool_recovers(arena: Arena) -> None:
    async def scenario() -> None:
        metrics = Metrics()
        pool = DecodePool(arena, 1, 1.5, metrics)
        pool.start()
        stuck = job(encode(noise(3000, 3000)))
        waiting = asyncio.create_task(pool.decode(stuck, 0))
        for _ in range(2):
            await until(lambda: stuck.running)
            (await worker_process()).suspend()
            await until(lambda: not stuck.running)
        with pytest.raises(ImageError, match=r"takes longer than 1\.5 s"):
            await waiting
        assert metrics.value("saccade_decode_worker_restarts_total") == 2
        await pool.decode(job(encode_array(noise(32, 32))), 0)
        await pool.close()

    asyncio.run(scenario())


def test_urgent_jobs_go_first(arena: Arena) -> None:
    async def scenario() -> None:
        pool = DecodePool(arena, 1, 60.0, Metrics())
        order: list[str] = []

        async def run(name: str, urgent: bool) -> None:
            await pool.decode(job(encode(noise(32, 32)), urgent), 0)
            order.append(name)

        tasks = [
            asyncio.create_task(run(name, urgent))
            for name, urgent in (("a", False), ("b", False), ("c", True), ("d", True))
        ]
        await asyncio.sleep(0)
        pool.start()
        await asyncio.gather(*tasks)
        assert order == ["c", "d", "a", "b"]
        await pool.close()

    asyncio.run(scenario())


def test_workers_that_never_start_are_the_machines_error_not_the_pictures(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def scenario() -> None:
        pool = DecodePool(arena, 1, 60.0, Metrics())
        pool.start()
        with pytest.raises(EngineUnavailable, match="do not start"):
            await pool.decode(job(encode(noise(32, 32))), 0)
        await pool.close()

    asyncio.run(scenario())


def test_a_picture_that_swells_beyond_its_header_is_refused_and_hurts_nobody(arena: Arena) -> None:
    async def scenario() -> None:
        metrics = Metrics()
        pool = DecodePool(arena, 1, 60.0, metrics)
        pool.start()
        bomb = png(20_000, 20_000, bytes(2**20))
        with pytest.raises(ImageError, match="more memory than a picture of its size should"):
            await pool.decode(Job(bomb, Probe("PNG", 10, 10, "RGB", 1, 1), (10, 10), True), 0)
        await pool.decode(job(encode(noise(64, 64))), 0)
        assert metrics.value("saccade_decode_worker_restarts_total") == 0
        await pool.close()

    asyncio.run(scenario())


def test_a_job_has_a_memory_limit() -> None:
    code = (
        "import numpy\nfrom saccade.media.decode_worker import _limit_memory\n_limit_memory(64 "
        "<< 20)\nnumpy.ones(16 << 20, numpy.uint8)\n"
        "try:\n    numpy.ones(256 << 20, numpy.uint8)\nexcept MemoryError:\n    print('refused')"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
        == "refused\n"
    )


PARENT = """
import asyncio, sys
import psutil
from saccade.core.arena import Arena
from saccade.core.metrics import Metrics
from saccade.media.content import Probe, encode_array, probe
from saccade.media.pool import DecodePool, Job
import numpy as np

async def main():
    pool = DecodePool(Arena.create(1 << 30), 2, 60.0, Metrics())
    pool.start()
    data = encode_array(np.zeros((32, 32, 3), np.uint8))
    first = Job(data, probe(data, 10**9), (32, 32), True)
    await pool.decode(first, 0)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    data = encode_array(np.zeros((8000, 8000, 3), np.uint8))
    job = Job(data, probe(data, 10**9), (8160, 8160), True)
    await asyncio.gather(*(pool.decode(job, 1 << 20) for _ in range(50)))

asyncio.run(main())
"""


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_a_server_that_is_killed(fate: signal.Signals) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.3)  # into the long jobs
        os.kill(parent.pid, fate)
        parent.wait()
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=10
    )
    assert not alive, f"orphans: {alive}"
    assert set(Path("/dev/shm").iterdir()) == shared_before


def test_a_picture_that_cannot_be_decoded_leaves_others_alone(media_path: MakePath) -> None:
    """The same through the whole path: five good pictures and a hostile one between them."""
    from tests.media.test_media import ready

    async def scenario() -> None:
        bad = encode(noise(300, 300))[:20_000]
        async with media_path() as path:
            pictures = [
                await ready(path.media, data)
                for data in [*(encode(noise(100, 100, seed)) for seed in range(5)), bad]
            ]
            results = await asyncio.gather(
                *(path.media.pixels(picture.image.key) for picture in pictures),
                return_exceptions=True,
            )
            assert [isinstance(result, ImageError) for result in results] == [False] * 5 + [True]

    asyncio.run(scenario())
