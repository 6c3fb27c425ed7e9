"""Decode workers may crash, hang and blow up: one job is hurt at most, nothing is left behind, and
the pool goes on.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from saccade.core.arena import Arena
from saccade.core.errors import EngineUnavailable, ImageError
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.core.plan import PixelSlot
from saccade.core.recipe import whole
from saccade.media.content import Probe, digest
from saccade.media.formats.header import probe
from saccade.media.sources.fairness import Requester
from saccade.media.workers import header_pool
from saccade.media.workers import pool as media_pool
from saccade.media.workers.decode_queue import OVERTAKEN, Job, JobBatch, JobQueue
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.header_pool import BATCH_IMAGES
from saccade.media.workers.pool import DecodePool
from saccade.media.workers.worker import TimeUp, limited_time
from saccade.media.workers.worker_slots import WorkerSlot, WorkerSlots
from tests.helpers.until import until
from tests.media.clips import clip
from tests.media.conftest import MakePath
from tests.media.pictures import decoded, encode, noise, photo, png, resized

RESTARTS, DECODES = "saccade_image_worker_restarts_total", "saccade_decodes_total"
WORKERS = "saccade-decode", "saccade-header"
ROOT = Path(__file__).parent.parent.parent
OTHERS: set[int] = set()
"""Children of this process that a pool has nothing to do with: stocks of others."""
EARLIER: set[int] = set()
"""Workers that were there before a test: of other pools of this process, which share its fork
server.
"""


def job(data: bytes, size: tuple[int, int] | None = None, **options: Any) -> Job:
    found = probe(data, 10**9)
    return Job(digest(data), data, found, whole(size or found.upright), **options)


def workers(name: str = "saccade-decode") -> list[psutil.Process]:
    """The image workers of this process that decode, or those of another kind."""
    found = []
    own = [child for child in psutil.Process().children() if child.pid not in OTHERS]
    for child in (*own, *(each for fork_server in own for each in descendants(fork_server))):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return [child for child in found if child.pid not in EARLIER]


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def ready(pool: DecodePool) -> None:
    """Wait until the workers take orders: one stopped before is a start that hangs."""
    await until(lambda: pool.headers.slots.idle() is not None and pool._decoders.idle() is not None)


async def header(pool: DecodePool, data: bytes) -> Probe:
    return await pool.headers.read_header(digest(data), data, Requester())


async def worker_process() -> psutil.Process:
    """The (only) worker that decodes, once it exists."""
    await until(lambda: bool(workers()))
    return workers()[0]


@dataclass(frozen=True)
class SharedForkServers:
    """What workers are forked from in several tests, and its processes."""

    fork_servers: ForkServers
    pids: frozenset[int]

    @classmethod
    def start(cls) -> SharedForkServers:
        before = children()
        fork_servers = ForkServers()
        fork_servers.start()
        atexit.register(fork_servers.close)
        return cls(fork_servers, frozenset(children() - before))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


shared = cache(SharedForkServers.start)


@asynccontextmanager
async def running(
    arena: Arena,
    metrics: Metrics | None = None,
    forked_from: Callable[[], SharedForkServers] | None = shared,
    **options: Any,
) -> AsyncIterator[DecodePool]:
    """A pool of one worker that decodes; with stocks of its own where it shares none."""
    found = forked_from() if forked_from else None
    OTHERS.clear()
    OTHERS.update(children() - (found.pids if found else frozenset()))
    media = MediaOptions(**{"media_workers": 1, "decode_timeout": 60.0, **options})
    pool = DecodePool(arena, media, metrics or Metrics(), found.fork_servers if found else None)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Each test's own; workers that are left are no more seen, so that `worker_process` finds the
    right one.
    """
    EARLIER.clear()
    psutil.wait_procs(workers(), timeout=2)  # those of the test before have been killed
    for name in WORKERS:
        EARLIER.update(worker.pid for worker in workers(name))
    arena = Arena.create(128 << 20)
    yield arena
    arena.close()


@pytest.mark.more
async def test_a_worker_killed_in_the_middle_is_replaced_and_the_picture_decoded(
    arena: Arena,
) -> None:
    metrics = Metrics()
    async with running(arena, metrics) as pool:
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
        assert metrics.value(RESTARTS) == 1
    assert not process.is_running()
    assert not workers()


@pytest.mark.more
@pytest.mark.parametrize(("cause", "again"), [(signal.SIGKILL, 1), (signal.SIGSEGV, 0)])
async def test_a_picture_that_ends_every_worker_fails_alone(
    arena: Arena, cause: signal.Signals, again: int
) -> None:
    """And is refused from then on, unless its workers were killed from outside."""
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        # Nearly half a second of work, so that it is not done before its worker is ended.
        data = png(7000, 7000, bytes(7000 * 21_001))
        await worker_process()
        deadly = job(data, (64, 64))
        waiting = asyncio.create_task(pool.decode(deadly, 0))
        for lost in range(1, 3):
            await until(lambda: deadly.running)
            (await worker_process()).send_signal(cause)
            await until(lambda lost=lost: metrics.value(RESTARTS) == lost)  # type: ignore[misc]
        with pytest.raises(ImageError, match="crashed"):
            await waiting
        await pool.decode(job(encode(noise(64, 64, seed=1))), 0)
        assert metrics.value(RESTARTS) == 2
        before = metrics.value(DECODES)
        with contextlib.suppress(ImageError):
            await pool.decode(job(data, (96, 96)), 0)
        assert metrics.value(DECODES) == before + again


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of a time limit a worker gets to run, it is its image's to bear."""
    monkeypatch.setattr(media_pool, "BLAME", 0.01)


@pytest.mark.more
async def test_what_takes_too_much_processor_time_is_refused_for_a_while(
    arena: Arena, busy_machine: None
) -> None:
    """No second try, and no work for whoever asks again, at any size."""
    metrics = Metrics()
    async with running(arena, metrics, decode_timeout=0.2) as pool:
        data = png(12_000, 12_000, bytes(12_000 * 36_001))  # more than a second of work
        await worker_process()
        with pytest.raises(ImageError, match=r"takes longer than 0\.2 s"):
            await pool.decode(job(data, (64, 64)), 0)
        assert metrics.value(RESTARTS) == 1
        for size in (64, 96):
            with pytest.raises(ImageError, match=r"takes longer than 0\.2 s"):
                await pool.decode(job(data, (size, size)), 0)
        assert (metrics.value(RESTARTS), metrics.value(DECODES)) == (1, 1)


@pytest.mark.more
async def test_a_stopped_worker_is_replaced_and_the_image_is_not_to_blame(arena: Arena) -> None:
    metrics = Metrics()
    async with running(arena, metrics, decode_timeout=1.5) as pool:
        data = encode(noise(300, 300))
        await pool.decode(job(encode(noise(32, 32))), 0)  # so that it takes orders
        stopped = await worker_process()
        stopped.suspend()
        await pool.decode(job(data), 0)
        np.testing.assert_array_equal(arena.view(PixelSlot(0, 300, 300)), decoded(data))
        assert not stopped.is_running()
        assert (metrics.value(RESTARTS), metrics.value(DECODES)) == (1, 3)


@pytest.mark.more
async def test_an_image_whose_workers_are_stopped_again_and_again_is_the_machines_error(
    arena: Arena,
) -> None:
    """And is decoded as soon as a worker runs."""
    metrics = Metrics()
    async with running(arena, metrics, decode_timeout=0.5) as pool:
        data, seen = encode(noise(300, 300)), set[int]()
        await ready(pool)
        waiting = asyncio.create_task(pool.decode(job(data), 0))
        while not waiting.done():
            for process in workers():
                if process.pid not in seen:
                    process.suspend()
                    seen.add(process.pid)
            await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="no CPU time"):
            await waiting
        for process in workers():
            process.resume()
        await pool.decode(job(data), 0)


@pytest.mark.more
async def test_a_stopped_reader_is_replaced_and_the_image_is_not_to_blame(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_pool, "HEADER_SECONDS", 1.0)
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        await ready(pool)
        for process in workers("saccade-header"):
            process.suspend()
        data = encode(noise(20, 20))
        assert await header(pool, data) == probe(data, 10**9)
        assert metrics.value(RESTARTS) == 1


async def test_one_decode_serves_all_sizes_asked_of_the_same_bytes(arena: Arena) -> None:
    metrics = Metrics()
    async with running(arena, metrics, media_workers=2) as pool:
        data = encode(photo(300, 400), "JPEG")
        sizes = [(32 * number, 48 * number) for number in range(1, 11)]
        jobs = [job(data, size) for size in sizes]
        offsets = [number << 20 for number in range(len(sizes))]
        await asyncio.gather(*map(pool.decode, jobs, offsets))
        assert metrics.value(DECODES) == 1
        for size, offset in zip(sizes, offsets, strict=True):
            found = arena.view(PixelSlot(offset, *size))
            np.testing.assert_array_equal(found, resized(decoded(data), size))


@pytest.mark.more
async def test_the_same_bytes_cost_one_time_out_however_many_ask(
    arena: Arena, busy_machine: None
) -> None:
    metrics = Metrics()
    async with running(arena, metrics, media_workers=2, decode_timeout=0.2) as pool:
        data = png(12_000, 12_000, bytes(12_000 * 36_001))
        await until(lambda: len(workers()) == 2)
        first = asyncio.create_task(pool.decode(job(data, (64, 64)), 0))
        await until(lambda: metrics.value(DECODES) == 1)
        later = [pool.decode(job(data, (32, 32 * n)), n << 20) for n in range(1, 41)]
        results = await asyncio.gather(first, *later, return_exceptions=True)
        assert all(isinstance(result, ImageError) for result in results)
        assert (metrics.value(RESTARTS), metrics.value(DECODES)) == (1, 1)


async def test_work_that_nobody_waits_for_is_dropped_and_its_worker_stopped(arena: Arena) -> None:
    """Cancelling ends what waits and what runs; the slot is safe when the call has returned."""
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        await ready(pool)
        process = await worker_process()
        process.suspend()
        under_way = job(encode(noise(500, 500)))
        waits = job(encode(noise(500, 500, seed=1)))
        tasks = [asyncio.create_task(pool.decode(each, 0)) for each in (under_way, waits)]
        await until(lambda: under_way.running or waits.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not process.is_running()
        arena.view(PixelSlot(0, 500, 500))[:] = 7
        await pool.decode(job(encode(noise(32, 32))), 1 << 20)
        assert (arena.view(PixelSlot(0, 500, 500)) == 7).all()
        assert (metrics.value(RESTARTS), metrics.value(DECODES)) == (1, 2)


async def test_a_decode_goes_on_for_those_who_still_wait(arena: Arena) -> None:
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        data = encode(noise(500, 500))
        await ready(pool)
        process = await worker_process()
        process.suspend()
        jobs = [job(data), job(data, (32, 32))]
        leaves, stays = (
            asyncio.create_task(pool.decode(each, at << 20)) for at, each in enumerate(jobs)
        )
        await until(lambda: jobs[1].running)
        leaves.cancel()
        await asyncio.sleep(0.3)
        assert not leaves.done(), "its slot is being written"
        process.resume()
        await stays
        await asyncio.gather(leaves, return_exceptions=True)
        assert (metrics.value(RESTARTS), metrics.value(DECODES)) == (0, 1)


def test_small_pictures_go_first_and_clients_take_turns() -> None:
    """`a` to `d` are one client's, in two requests; `x` is another's, who came last."""

    def some(seed: int, side: int, client: str, request: str) -> Job:
        return job(encode(noise(side, side, seed)), client=client, request=request)

    jobs = {
        "a": some(1, 600, "one", "1"),
        "b": some(2, 300, "one", "1"),
        "c": some(3, 400, "one", "1"),
        "d": some(4, 400, "one", "2"),
        "x": some(5, 400, "other", "3"),
    }
    turns = JobQueue(1 << 40)
    for one in jobs.values():
        turns.add(one)
    names = {one: name for name, one in jobs.items()}
    assert "".join(names[taken(turns)[0]] for _ in jobs) == "bxdca"


def test_a_large_picture_is_not_put_off_for_ever() -> None:
    """A new client comes with a small picture after each: the large one has its turn."""
    turns = JobQueue(1 << 40)
    probes = {side: Probe("PNG", side, side, "RGB", 1, 1) for side in (10, 40)}

    def some(name: str, side: int) -> Job:
        return Job(name.encode(), b"", probes[side], whole((32, 32)), client=name)

    turns.add(some("large", 40))
    served = []
    for number in range(40):
        turns.add(some(f"small {number}", 10))
        served.append(taken(turns)[0].client)
    assert served.index("large") == 15, "its price is 16 small ones'"


@pytest.mark.parametrize("what", ["images", "headers", "videos"])
async def test_no_client_holds_all_workers_however_slow_its_orders_are(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One client's orders do not end before two others have theirs, by a worker forked for that."""
    served, others_done, prepare = list[str](), asyncio.Event(), WorkerSlots.prepare

    async def held(slots: WorkerSlots, slot: WorkerSlot, parts: list[bytes], tenant: str) -> Any:
        served.append(tenant)
        if tenant == "mallory":
            await others_done.wait()
        return await prepare(slots, slot, parts, tenant)

    monkeypatch.setattr(WorkerSlots, "prepare", held)
    name = "saccade-decode" if what == "images" else "saccade-header"
    async with running(arena) as pool:
        await ready(pool)

        async def ask(client: str, seed: int) -> None:
            data = clip() + bytes(seed) if what == "videos" else encode(noise(32, 32, seed))
            if what == "images":
                await pool.decode(job(data, client=client, tenant=client), 0)
                return
            headers = pool.headers if what == "headers" else pool.video_headers
            await headers.read_header(digest(data), data, Requester(client, tenant=client))

        hostile = [asyncio.create_task(ask("mallory", seed)) for seed in range(40)]
        async with asyncio.timeout(60):
            await until(lambda: bool(served))
            before = len(workers(name))
            for seed, client in enumerate(("anna", "ben", "anna")):
                await ask(client, 40 + seed)
            assert len(workers(name)) == before + 1
        assert served == ["mallory", "anna", "ben", "anna"]
        others_done.set()
        await asyncio.gather(*hostile)


TINY = Probe("PNG", 10, 10, "RGB", 1, 1)


def of_bytes(name: str, mib: int = 0, client: str = "") -> Job:
    """Takes 48 MiB of memory and twice its bytes."""
    return Job(name.encode(), bytes(mib << 20), TINY, whole((32, 32)), client=client)


def taken(turns: JobQueue, *running: JobBatch) -> list[Job]:
    batch = turns.take_jobs(running)
    return [] if batch is None else batch.jobs


def test_what_waits_for_memory_is_overtaken_a_few_times_only() -> None:
    turns = JobQueue(600 << 20)
    other, large = of_bytes("other", 76), of_bytes("large", 200)
    turns.add(other)
    running = turns.take_jobs(())
    assert running is not None and not running.reserved
    turns.add(large)
    served: list[Job] = []
    for number in range(20):
        turns.add(of_bytes(f"{number}"))
        served += taken(turns, running)
    assert len(served) == OVERTAKEN
    assert large not in served
    assert taken(turns) == [large]


def test_small_images_of_others_are_decoded_while_a_large_one_waits_and_runs() -> None:
    """By the reserve, one at a time, which delays the large one by nothing."""
    turns = JobQueue(1024 << 20)
    turns.add(of_bytes("other", 100, "mallory"))
    other = turns.take_jobs(())
    large = of_bytes("large", 480, "anna")
    large.overtaken = OVERTAKEN
    turns.add(large)
    turns.add(of_bytes("mallory's next", client="mallory"))
    assert other is not None and turns.take_jobs([other]) is None
    turns.add(of_bytes("too large for the reserve", 41, "ben"))
    small = [of_bytes(name, client=name) for name in ("cleo", "dora")]
    for each in small:
        turns.add(each)
    first = turns.take_jobs([other])
    assert first is not None and (first.jobs, first.reserved) == (small[:1], True)
    assert turns.take_jobs([other, first]) is None, "one at a time"
    second = turns.take_jobs([other])
    assert second is not None and (second.jobs, second.reserved) == (small[1:], True)
    running = turns.take_jobs([second])
    assert running is not None and (running.jobs, running.reserved) == ([large], False)
    last = turns.take_jobs([running])
    assert last is not None and last.reserved
    assert last.first.client == "mallory", "whose other image has been decoded"
    assert [job.client for job in turns] == ["ben"], "whose image needs too much memory"


def test_a_stream_of_small_images_does_not_starve_a_large_one() -> None:
    """Two workers: when a batch ends, the next is taken, and another client's image comes."""
    turns = JobQueue(1024 << 20)
    turns.add(of_bytes("before", 100, "before"))
    running = [turns.take_jobs(())]
    turns.add(of_bytes("large", 480, "anna"))
    started: list[str] = []
    for number in range(40):
        turns.add(of_bytes(f"{number}", client=f"client {number}"))
        while len(running) < 2 and (batch := turns.take_jobs([each for each in running if each])):
            running.append(batch)
            started.append(batch.first.client)
        running.pop(0)
    assert started.index("anna") <= OVERTAKEN + 2
    assert len(started) >= 35


async def test_images_that_need_all_memory_are_decoded_one_after_another(arena: Arena) -> None:
    """Also where both wait for a worker when the workers become ready."""
    metrics, seen = Metrics(), list[int]()
    async with running(arena, metrics, media_workers=3, decode_memory_mb=60) as pool:
        await ready(pool)
        data = [encode(noise(64, 64, seed)) for seed in range(3)]
        calls = [asyncio.create_task(pool.decode(job(each), 0)) for each in data]
        while not all(call.done() for call in calls):
            seen.append(len(pool._batches))
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
    assert max(seen) == 1
    assert metrics.value(DECODES) == 3


@pytest.mark.more
async def test_workers_that_never_start_are_the_machines_error_not_the_pictures(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with running(arena, forked_from=None) as pool:
        with pytest.raises(EngineUnavailable, match="failed to start"):
            await pool.decode(job(encode(noise(32, 32))), 0)
        with pytest.raises(EngineUnavailable, match="failed to start"):
            await pool.headers.read_header(b"name", b"bytes", Requester())


@pytest.mark.slow
async def test_when_all_processes_are_killed_others_do_the_work(arena: Arena) -> None:
    """Again and again, and no image is to blame."""
    metrics = Metrics()
    async with running(arena, metrics, None) as pool:
        for seed in range(2):
            await worker_process()
            for name in (*WORKERS, "saccade-nursery", "saccade-images"):
                for process in workers(name):
                    process.kill()
            data = encode(noise(64, 64, seed))
            await pool.decode(job(data), 0)
            assert await header(pool, data) == probe(data, 10**9)
        assert metrics.value(RESTARTS) >= 2


@pytest.mark.more
async def test_a_killed_supervisor_is_replaced_and_nothing_is_loaded_again(arena: Arena) -> None:
    """What loads torch forks supervisors and does nothing else; workers end with their
    supervisor.
    """
    metrics = Metrics()
    async with running(arena, metrics, None) as pool:
        data = encode(noise(64, 64))
        await pool.decode(job(data), 0)
        assert await header(pool, data) == probe(data, 10**9)
        loaded = {process.pid for process in workers("saccade-images")}
        assert len(loaded) == 2
        for seed in range(1, 4):
            supervisors = workers("saccade-nursery")
            former = [process for name in WORKERS for process in workers(name)]
            assert (len(supervisors), len(former)) == (2, 2)
            for process in supervisors:
                process.kill()
            data = encode(noise(64, 64, seed))
            await pool.decode(job(data), 0)
            np.testing.assert_array_equal(arena.view(PixelSlot(0, 64, 64)), decoded(data))
            assert await header(pool, data) == probe(data, 10**9)
            await until(lambda: metrics.value(RESTARTS) == 2 * seed)  # noqa: B023
            await until(lambda: not any(each.is_running() for each in former))  # noqa: B023
        assert {process.pid for process in workers("saccade-images")} == loaded
    assert not workers("saccade-images") and not workers("saccade-nursery")


async def test_headers_of_a_request_are_read_in_one_round(arena: Arena) -> None:
    async with running(arena) as pool:
        pictures = [encode(noise(20, 20 + seed, seed)) for seed in range(BATCH_IMAGES)]
        twice = [*pictures, *pictures]
        first = await header(pool, twice[0])
        assert first == probe(twice[0], 10**9)
        idle = pool.headers.slots.idle()
        assert idle is not None
        before = idle.serial
        found = await asyncio.gather(*(header(pool, data) for data in twice))
        assert found == [probe(data, 10**9) for data in twice]
        idle = pool.headers.slots.idle()
        assert idle is not None and idle.serial == before + 1


async def test_a_header_that_ends_its_reader_is_refused_and_the_others_are_read(
    arena: Arena,
) -> None:
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        await ready(pool)
        bad, good = encode(noise(20, 20)), encode(noise(30, 30))
        for process in workers("saccade-header"):
            process.suspend()
        bad_asked = asyncio.create_task(header(pool, bad))
        await asyncio.sleep(0)
        good_asked = asyncio.create_task(header(pool, good))
        for lost in range(1, 3):
            await asyncio.sleep(0.2)
            for process in workers("saccade-header"):
                process.send_signal(signal.SIGSEGV)
                process.resume()
            await until(lambda lost=lost: metrics.value(RESTARTS) >= lost)  # type: ignore[misc]
            for process in workers("saccade-header"):
                process.suspend()
        for process in workers("saccade-header"):
            process.resume()
        assert await good_asked == probe(good, 10**9)
        with contextlib.suppress(ImageError):
            await bad_asked


async def test_a_picture_that_swells_beyond_its_header_is_refused_and_hurts_nobody(
    arena: Arena,
) -> None:
    metrics = Metrics()
    async with running(arena, metrics) as pool:
        bomb = png(20_000, 20_000, bytes(2**20))
        with pytest.raises(ImageError, match="too much memory for its size"):
            await pool.decode(
                Job(b"bomb", bomb, Probe("PNG", 10, 10, "RGB", 1, 1), whole((10, 10))), 0
            )
        await pool.decode(job(encode(noise(64, 64))), 0)
        assert metrics.value(RESTARTS) == 0


def test_an_order_has_a_memory_limit() -> None:
    code = (
        "import numpy, os\nfrom saccade.media.workers.worker import limited_memory\n"
        "statm = os.open('/proc/self/statm', os.O_RDONLY)\n"
        "with limited_memory(64 << 20, statm):\n    numpy.ones(16 << 20, numpy.uint8)\n"
        "    try:\n        numpy.ones(256 << 20, numpy.uint8)\n"
        "    except MemoryError:\n        print('refused')"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
        == "refused\n"
    )


def test_an_order_has_a_time_limit_that_no_parser_can_hide() -> None:
    def parser() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TimeUp), limited_time(0.05):
        parser()


PARENT = """
import asyncio, sys
import psutil
from saccade.core.arena import Arena
from saccade.core.recipe import whole
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.media.content import encode_array, read_raw
from saccade.media.workers.pool import DecodePool
from saccade.media.workers.decode_queue import Job
import numpy as np

async def main():
    pool = DecodePool(Arena.create(1 << 30), MediaOptions(media_workers=2), Metrics())
    pool.start()
    data = encode_array(np.zeros((32, 32, 3), np.uint8))
    await pool.decode(Job(b"", data, read_raw(data), whole((32, 32))), 0)
    while len(found := psutil.Process().children(recursive=True)) < 7:  # not all at once
        await asyncio.sleep(0.01)
    print(*(child.pid for child in found), flush=True)
    data = encode_array(np.zeros((8000, 8000, 3), np.uint8))
    jobs = [Job(b"%d" % n, data, read_raw(data), whole((8160, 8160))) for n in range(50)]
    await asyncio.gather(*(pool.decode(job, 1 << 20) for job in jobs))

asyncio.run(main())
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "fate", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_die_with_a_server_that_is_killed(fate: signal.Signals) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        processes = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(processes) == 7, (
            "two fork servers, their supervisors, one for headers, two that decode"
        )
        time.sleep(0.3)  # into the long jobs
        os.kill(parent.pid, fate)
        parent.wait()
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=10
    )
    assert not alive, f"orphans: {alive}"
    assert set(Path("/dev/shm").iterdir()) <= shared_before


@pytest.mark.more
async def test_a_machine_without_descriptors_is_no_wait_without_end(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a header or for pixels is told, and the worker takes the next order."""
    data, dup = encode(noise(64, 64)), os.dup

    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with running(arena) as pool:
        await ready(pool)
        for asked in (
            lambda: header(pool, data),
            lambda: pool.decode(job(data), 0),
        ):
            monkeypatch.setattr(os, "dup", none_left)
            with pytest.raises(EngineUnavailable, match="Too many open files"):
                await asked()
            monkeypatch.setattr(os, "dup", dup)
            await asked()
        np.testing.assert_array_equal(arena.view(PixelSlot(0, 64, 64)), decoded(data))


async def test_a_picture_that_cannot_be_decoded_leaves_others_alone(media_path: MakePath) -> None:
    """The same through the whole path: five good pictures and a hostile one between them."""
    from tests.media.test_media import into_slot, ready

    bad = encode(noise(300, 300))[:20_000]
    async with media_path() as path:
        pictures = [
            await ready(path.media, data)
            for data in [*(encode(noise(100, 100, seed)) for seed in range(5)), bad]
        ]
        results = await asyncio.gather(
            *(
                into_slot(path.media, picture, place << 20)
                for place, picture in enumerate(pictures)
            ),
            return_exceptions=True,
        )
        assert [isinstance(result, ImageError) for result in results] == [False] * 5 + [True]
