"""What a body costs while it arrives: its bytes are copied once, when all are here."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator

import pytest
from starlette.requests import Request
from starlette.types import Message

from saccade.core.config import MIB
from saccade.core.metrics import Metrics
from saccade.edge.body import Bodies, read_whole

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


async def read(receive: Callable[[], Awaitable[Message]]) -> bytearray:
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with Bodies(64 * MIB, Metrics()).hold(request, 64 * MIB) as held:
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
