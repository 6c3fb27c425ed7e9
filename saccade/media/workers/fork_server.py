"""The process that image workers are forked from, as the front sees it.

Owns the process: started for the first supervisor, or before, and again after its end. A fork
server has loaded the workers' libraries and knows no arena. So any number of `WorkerSlots`, on any
threads, may have their supervisors from one fork server.
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
from saccade.media.workers.orders import EXIT_STATUS, Boot, SupervisorOptions

SUPERVISOR = f"{__package__}.supervisor"
"""The process's module, which the front has no use for."""


@dataclass(frozen=True, slots=True, eq=False)
class SupervisorLink:
    """The front's end of a supervisor: the socket, a pipe that ends with the last process, a pipe
    for the exit status, and the fork server asked.
    """

    socket: socket.socket
    lifeline: int
    report: int
    fork_server: Child

    def close(self) -> None:
        """Close all but the socket, which the talker closes."""
        os.close(self.lifeline)
        os.close(self.report)

    async def wait_closed(self) -> None:
        """Wait until the last process has exited."""
        await _readable(self.lifeline)

    async def status(self) -> int:
        """Return the supervisor's exit status, or the fork server's if first to end. It is negative
        for a signal.
        """
        await _readable(self.report)
        data = os.read(self.report, EXIT_STATUS.size)
        if not data:
            return await self.fork_server.wait()
        status: int = EXIT_STATUS.unpack(data)[0]
        return status


class ForkServer:
    """A process that forks supervisors."""

    def __init__(self, decodes: bool, own: OwnPixels | None = None) -> None:
        """Set up a fork server from the fields of `Boot`."""
        self._boot = Boot(decodes, own)
        self._lock = threading.Lock()
        self._child: Child | None = None

    def start(self) -> None:
        """Start the process, unless running. It ends with the calling thread."""
        with self._lock:
            self._running()

    def fork(self, wanted: SupervisorOptions, memory_files: Sequence[int]) -> SupervisorLink:
        """Ask for a supervisor. `memory_files` are the descriptors to pass: the arena's, if any,
        and each worker's.
        """
        ours, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        report, status = os.pipe()
        try:
            with self._lock:
                child = self._running()
                descriptors = (theirs.fileno(), held, status, *memory_files)
                with suppress(OSError):  # it has just exited: the pipes report it
                    socket.send_fds(child.socket, [msgspec.msgpack.encode(wanted)], descriptors)
        finally:
            theirs.close()
            os.close(held)
            os.close(status)
        return SupervisorLink(ours, lifeline, report, child)

    def kill(self) -> None:
        """End the process at once, with the supervisors."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the process and its supervisors, and wait for the end."""
        with self._lock:
            if self._child is not None:
                self._child.end_sync()
                self._child = None

    def _running(self) -> Child:
        if self._child is not None and self._child.status is not None:
            self._child.release()
            self._child = None
        if self._child is None:
            self._child = Child.spawn(SUPERVISOR, self._boot, (), image_environment())
        return self._child


@dataclass(frozen=True, slots=True)
class ForkServers:
    """One fork server for each kind of work. `readers` run without torch and are ready in a
    moment.
    """

    readers: ForkServer = field(default_factory=lambda: ForkServer(decodes=False))
    decoders: ForkServer = field(default_factory=lambda: ForkServer(decodes=True))

    @classmethod
    def preloading(cls, own: OwnPixels | None) -> ForkServers:
        """Make fork servers whose decoders have loaded a family's own operation. `own`: as in
        `Boot`.
        """
        return cls(decoders=ForkServer(True, own))

    def start(self) -> None:
        self.readers.start()
        self.decoders.start()

    def close(self) -> None:
        self.readers.close()
        self.decoders.close()


async def _readable(pipe: int) -> None:
    """Wait until a pipe has bytes, or its other end is closed."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pipe)
