"""The process that image workers are forked from, as the front sees it.

Owns the process: started for the first nursery, or before, and again after its end. A stock has
loaded the workers' libraries and knows no arena. So any number of `Lanes`, on any threads, may have
their nurseries from one stock. Knows nothing of orders.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from saccade.core.recipe import OwnPixels
from saccade.ipc.child import Child
from saccade.ipc.environment import image_environment
from saccade.media.workers import nursery
from saccade.media.workers.worker import EXIT_STATUS, Boot, NurseryWanted


@dataclass(frozen=True, slots=True, eq=False)
class NurseryLink:
    """The front's end of a nursery: the socket, a pipe that ends with the last process, a pipe for
    the exit status, and the stock asked.
    """

    socket: socket.socket
    lifeline: int
    report: int
    stock: Child

    def close(self) -> None:
        """Close all but the socket, which the talker closes."""
        os.close(self.lifeline)
        os.close(self.report)

    async def end(self) -> None:
        """Wait until the last process has gone."""
        await _readable(self.lifeline)

    async def status(self) -> int:
        """Return the nursery's exit status, or the stock's if first to end. It is negative for a
        signal.
        """
        await _readable(self.report)
        told = os.read(self.report, EXIT_STATUS.size)
        if not told:
            return await self.stock.wait()
        status: int = EXIT_STATUS.unpack(told)[0]
        return status


class Stock:
    """A process that forks nurseries."""

    def __init__(self, decodes: bool, own: OwnPixels | None = None) -> None:
        """Set up a stock from the fields of `Boot`."""
        self._boot = Boot(decodes, own)
        self._lock = threading.Lock()
        self._child: Child | None = None

    def start(self) -> None:
        """Start the process, unless running. It ends with the calling thread."""
        with self._lock:
            self._running()

    def fork(self, wanted: NurseryWanted, memory_files: Sequence[int]) -> NurseryLink:
        """Ask for a nursery. `memory_files` are the descriptors to pass: the arena's, if any, and
        each worker's.
        """
        ours, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        report, told = os.pipe()
        try:
            with self._lock:
                child = self._running()
                descriptors = (theirs.fileno(), held, told, *memory_files)
                with suppress(OSError):  # it has just ended: the pipes tell
                    socket.send_fds(child.socket, [msgspec.msgpack.encode(wanted)], descriptors)
        finally:
            theirs.close()
            os.close(held)
            os.close(told)
        return NurseryLink(ours, lifeline, report, child)

    def kill(self) -> None:
        """End the process at once, with the nurseries."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the process and its nurseries, and wait for the end."""
        with self._lock:
            if self._child is not None:
                self._child.end_sync()
                self._child = None

    def _running(self) -> Child:
        if self._child is not None and self._child.status is not None:
            self._child.release()
            self._child = None
        if self._child is None:
            self._child = Child.spawn(nursery.__name__, self._boot, (), image_environment())
        return self._child


@dataclass(frozen=True, slots=True)
class Stocks:
    """One stock for each kind of work. `readers` run without torch and are ready in a moment."""

    readers: Stock = field(default_factory=lambda: Stock(decodes=False))
    decoders: Stock = field(default_factory=lambda: Stock(decodes=True))

    @classmethod
    def preloading(cls, own: OwnPixels | None) -> Stocks:
        """Make stocks whose decoders have loaded a family's own operation. `own`: as in `Boot`."""
        return cls(decoders=Stock(True, own))

    def start(self) -> None:
        self.readers.start()
        self.decoders.start()

    def close(self) -> None:
        self.readers.close()
        self.decoders.close()


async def _readable(pipe: int) -> None:
    """Wait until a pipe has bytes, or all holders of the other end have gone."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pipe)
