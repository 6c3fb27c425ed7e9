"""What a body costs while it arrives: its bytes are copied once, when all are here, in a thread."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
from starlette.requests import Request
from starlette.types import Message

from saccade.core.config import MIB
from saccade.core.metrics import Metrics
from saccade.edge.body import MAX_ON_LOOP, Bodies, BodyThreads, read_whole

T = TypeVar("T")
PIECE = 256 * 1024
NUM_PIECES = 30 * MIB // PIECE
SLACK = MIB // 2
"""Bytes that reading allocates for its own: a list, counters, timers."""
TINY_PACKETS = 1024


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class RecordedThreads(BodyThreads):
    """`on_loop`: for each piece of work, whether it ran on the event loop's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop: list[bool] = []

    async def run(self, nbytes: int, work: Callable[[], T]) -> T:
        loop = threading.current_thread()

        def recorded() -> T:
            self.on_loop.append(threading.current_thread() is loop)
            return work()

        return await super().run(nbytes, recorded)


async def read(
    receive: Callable[[], Awaitable[Message]], threads: BodyThreads | None = None
) -> bytearray:
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    bodies = Bodies(64 * MIB, Metrics())
    bodies.threads = threads or bodies.threads
    with bodies.hold(request, 64 * MIB) as held:
        return await read_whole(request, held, 64 * MIB)


@pytest.mark.usefixtures("traced")
async def test_no_byte_of_a_body_is_copied_before_the_last_is_here() -> None:
    arrived = [bytes([number]) * PIECE for number in range(NUM_PIECES)]
    waiting = iter(arrived)
    before = tracemalloc.get_traced_memory()[0]
    copied: list[int] = []

    async def receive() -> Message:
        copied.append(tracemalloc.get_traced_memory()[0] - before)
        piece = next(waiting, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    body = await read(receive)
    copies = tracemalloc.get_traced_memory()[1] - before
    assert len(copied) == NUM_PIECES + 1
    assert max(copied) < SLACK, "bytes are copied as the body grows"
    assert copies < len(body) + SLACK, "the body is copied more than once"
    assert body == b"".join(arrived)


@pytest.mark.parametrize("nbytes", [MAX_ON_LOOP, MAX_ON_LOOP + 1])
async def test_a_large_body_is_joined_in_a_thread(nbytes: int) -> None:
    """Otherwise one client's body of 240 MiB would stop all streams for a quarter of a second."""
    waiting = iter((b"x" * (nbytes - 1), b"y", b""))

    async def receive() -> Message:
        piece = next(waiting)
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    threads = RecordedThreads()
    assert await read(receive, threads) == b"x" * (nbytes - 1) + b"y"
    assert threads.on_loop == [nbytes <= MAX_ON_LOOP]
    threads.close()


@pytest.mark.usefixtures("traced")
async def test_a_body_in_tiny_packets_takes_about_its_bytes() -> None:
    """A bytes object takes 33 bytes beside its content."""
    left, buffered = iter(range(2 * TINY_PACKETS, -1, -1)), {}

    async def receive() -> Message:
        await asyncio.sleep(0)  # as from a socket
        more = next(left)
        if more in (0, TINY_PACKETS):
            buffered[more] = tracemalloc.get_traced_memory()[0]
        return {"type": "http.request", "body": b"%016d" % more, "more_body": more > 0}

    body = await read(receive)
    assert len(body) == 16 * (2 * TINY_PACKETS + 1)
    assert buffered[0] - buffered[TINY_PACKETS] < 2 * 16 * TINY_PACKETS
