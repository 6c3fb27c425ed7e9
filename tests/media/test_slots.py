"""A full arena makes decoding wait: never fail, never deadlock, in a fair order."""

from __future__ import annotations

import asyncio
import random

import pytest

from saccade.core.arena import ALIGNMENT, Arena
from saccade.core.metrics import Metrics
from saccade.core.types import ImageKey
from saccade.media.content import Probe
from saccade.media.pixels import Decoders
from saccade.media.slots import Slots
from saccade.media.turns import Job

PAGES = 16


def job(pages: int, urgent: bool = False) -> Job:
    """Pixels that fill `pages` pages of the arena."""
    size = (ALIGNMENT // 64, 64 * pages // 3 if pages % 3 == 0 else 21 * pages)
    made = Job(b"", b"", Probe("PNG", 1, 1, "RGB", 1, 1), size, urgent=urgent)
    assert -(-made.nbytes // ALIGNMENT) == pages
    return made


def key(number: int) -> ImageKey:
    return ImageKey(bytes([number % 256, number // 256]) + bytes(30), bytes(16))


class SimulatedPool:
    """Decodes by letting other tasks run a few times; every tenth picture fails."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.decodes = 0

    async def decode(self, job: Job, offset: int) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        job.running = True
        self.decodes += 1
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.1:
            raise ValueError("a bad picture")


def test_decoding_waits_for_room_and_urgent_jobs_wait_least() -> None:
    async def scenario() -> None:
        slots = Slots(Arena.create(PAGES * ALIGNMENT), Metrics())
        slot = slots.fill(key(0), await slots.reserve(job(12, urgent=True)), leases=1)
        waiting = {
            name: asyncio.create_task(slots.reserve(work))
            for name, work in (("ahead", job(5)), ("urgent", job(6, urgent=True)))
        }
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting.values())
        slots.done(slot)
        await asyncio.sleep(0)
        assert all(task.done() for task in waiting.values())
        assert waiting["urgent"].result() < waiting["ahead"].result(), "placed first"

    asyncio.run(scenario())


def test_decoding_ahead_fills_half_of_the_arena_and_urgent_jobs_push_it_out() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        slots = Slots(Arena.create(PAGES * ALIGNMENT), metrics)
        for number in range(2):
            slots.fill(key(number), await slots.reserve(job(4)), leases=0, ahead=True)
        third = asyncio.create_task(slots.reserve(job(1)))
        await asyncio.sleep(0)
        assert not third.done(), "half is full"
        slots.fill(key(9), await slots.reserve(job(12, urgent=True)), leases=1)
        assert key(0) in slots
        assert key(1) not in slots, "the one decoded last made room"
        slots.settle(key(0))
        await third

    asyncio.run(scenario())


def test_cached_pixels_make_room_least_recently_used_first() -> None:
    async def scenario() -> None:
        slots = Slots(Arena.create(PAGES * ALIGNMENT), Metrics())
        for number in range(4):
            slots.done(slots.fill(key(number), await slots.reserve(job(4, urgent=True)), leases=1))
        again = slots.lease(key(0))
        assert again is not None
        slots.done(again)
        await slots.reserve(job(4, urgent=True))
        assert [key(number) in slots for number in range(4)] == [True, False, True, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_everyone_is_served_and_nothing_leaks(seed: int) -> None:
    """Requests push, an engine pulls and holds, askers leave, decodes fail, pictures come back: 300
    times per seed.
    """
    rng = random.Random(seed)
    metrics = Metrics()
    arena = Arena.create(PAGES * ALIGNMENT)
    slots = Slots(arena, metrics)
    served = 0

    async def engine(decoders: Decoders, number: int, pages: int) -> None:
        nonlocal served
        for _ in range(20):
            try:
                slot = await decoders.pixels(key(number), job(pages, urgent=True))
            except ValueError:
                continue
            try:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
            finally:
                slots.done(slot)
            served += 1
            return

    async def request(decoders: Decoders) -> None:
        number = rng.randrange(40)
        pages = 1 + number * 7 % PAGES
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        if rng.random() < 0.7:
            decoders.ahead(key(number), job(pages))
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        fate = rng.random()
        asker = asyncio.create_task(engine(decoders, number, pages))
        if fate < 0.2:
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            asker.cancel()
        await asyncio.gather(asker, return_exceptions=True)
        decoders.drop(key(number))

    async def scenario() -> None:
        pool = SimulatedPool(rng)
        decoders = Decoders(pool, slots, metrics)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            await asyncio.gather(*(request(decoders) for _ in range(300)))
            for _ in range(50):  # decodes that nobody waits for any more run out
                await asyncio.sleep(0)
        assert served >= 200
        assert metrics.value("saccade_arena_bytes_in_use") == 0
        assert await slots.reserve(job(PAGES, urgent=True)) == 0, "all of it can be had again"

    asyncio.run(scenario())
    arena.close()


def test_it_says_when_only_the_engine_can_make_room() -> None:
    async def scenario() -> None:
        slots = Slots(Arena.create(PAGES * ALIGNMENT), Metrics())
        full = asyncio.create_task(slots.wait_full())
        ahead = await slots.reserve(job(8))
        held = slots.fill(key(0), await slots.reserve(job(8, urgent=True)), leases=1)
        waiting = asyncio.create_task(slots.reserve(job(12, urgent=True)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not full.done(), "something is still being decoded"
        slots.fill(key(1), ahead, leases=0, ahead=True)
        await full
        assert not waiting.done() and key(1) not in slots, "what was decoded ahead was not enough"
        slots.done(held)
        await waiting
        again = asyncio.create_task(slots.wait_full())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not again.done(), "said once"
        again.cancel()

    asyncio.run(scenario())
