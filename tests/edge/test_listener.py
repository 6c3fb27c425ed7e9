"""Connections are accepted a few in a turn of the event loop, all of them, and none is lost for
want of a descriptor.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from saccade.edge import listener
from saccade.edge.listener import ACCEPTS_PER_TURN, Listener

MANY = 10 * ACCEPTS_PER_TURN + 3
Run = Callable[[Coroutine[Any, Any, None]], None]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


class Counted(asyncio.Protocol):
    """A connection that counts itself, and says hello."""

    def __init__(self, made: list[Counted]) -> None:
        self._made = made
        self.nodelay = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self)
        connection = transport.get_extra_info("socket")
        self.nodelay = bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        transport.write(b"hello")  # type: ignore[attr-defined]
        transport.close()


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=MANY) as bound:
        yield bound


def connect(stack: ExitStack, bound: socket.socket, count: int) -> list[socket.socket]:
    """Clients that wait to be accepted."""
    return [
        stack.enter_context(socket.create_connection(bound.getsockname(), timeout=10))
        for _ in range(count)
    ]


@both_loops
def test_a_few_are_accepted_in_a_turn_and_all_in_the_end(bound: socket.socket, run: Run) -> None:
    async def scenario(clients: list[socket.socket]) -> None:
        made: list[Counted] = []
        served = Listener(bound, lambda: Counted(made))
        turns = seen = 0
        while len(made) < MANY:
            await asyncio.sleep(0)
            turns += 1
            # What was accepted in one turn is made in another: two turns' worth may meet.
            assert len(made) - seen <= 2 * ACCEPTS_PER_TURN
            seen = len(made)
        assert turns >= MANY / ACCEPTS_PER_TURN
        if run is uvloop.run:  # asyncio asks for a socket that names its protocol
            assert all(each.nodelay for each in made)
        served.close()
        served.close()
        await served.wait_closed()

    with ExitStack() as stack:
        clients = connect(stack, bound, MANY)
        run(scenario(clients))
        assert all(each.recv(10) == b"hello" for each in clients)


def test_without_a_descriptor_those_who_wait_are_accepted_later(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        made: list[Counted] = []
        served = Listener(bound, lambda: Counted(made))
        try:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            async with asyncio.timeout(10):
                while len(caplog.records) < 2:  # once more, and not in every turn
                    await asyncio.sleep(0.01)
            assert not made
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            async with asyncio.timeout(10):
                while len(made) < 3:
                    await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            served.close()
        assert {record.getMessage() for record in caplog.records} == {
            "new connections cannot be accepted: [Errno 24] Too many open files"
        }

    with ExitStack() as stack:
        connect(stack, bound, 3)
        uvloop.run(scenario())


def test_a_closed_listener_leaves_those_who_wait(bound: socket.socket) -> None:
    async def scenario() -> None:
        made: list[Counted] = []
        served = Listener(bound, lambda: Counted(made))
        served.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not made

    with ExitStack() as stack:
        connect(stack, bound, 1)
        uvloop.run(scenario())
