"""The front end's side of fork servers. Supervisors and image workers are forked from these
processes.

A fork server is started with the first supervisor at the latest, and restarted after it has exited.
It has loaded the workers' libraries but does not map an arena. So more than one `WorkerSlots`, on
any threads, can share a fork server.
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
"""The module that the process runs. The front end does not import it."""


@dataclass(frozen=True, slots=True, eq=False)
class SupervisorLink:
    """The front end's connection to a supervisor."""

    socket: socket.socket
    lifeline: int  # read end of a pipe that is closed when the supervisor and its workers exited
    report: int  # read end of a pipe for the supervisor's exit status
    fork_server: Child

    def close(self) -> None:
        """Close the pipes. The channel that uses the socket closes the socket."""
        os.close(self.lifeline)
        os.close(self.report)

    async def wait_closed(self) -> None:
        """Wait until the supervisor and all its workers have exited."""
        await _readable(self.lifeline)

    async def status(self) -> int:
        """Wait until the supervisor has exited, and return its exit status.

        It is negative for a signal. If the fork server exits first, return the status of the fork
        server.
        """
        await _readable(self.report)
        data = os.read(self.report, EXIT_STATUS.size)
        if not data:
            return await self.fork_server.wait()
        status: int = EXIT_STATUS.unpack(data)[0]
        return status


class ForkServer:
    """Starts and restarts a process that forks supervisors."""

    def __init__(self, decodes: bool, own: OwnPixels | None = None) -> None:
        """Store the options of the process, which are the fields of `Boot`."""
        self._boot = Boot(decodes, own)
        self._lock = threading.Lock()
        self._child: Child | None = None

    def start(self) -> None:
        """Start the process unless it is running. It is killed when the calling thread exits."""
        with self._lock:
            self._running()

    def fork(self, wanted: SupervisorOptions, memory_files: Sequence[int]) -> SupervisorLink:
        """Request a new supervisor, and return the connection to it.

        memory_files: the file descriptors to pass. These are the arena's, if any, and the inbox of
            each worker.
        """
        ours, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        report, status = os.pipe()
        try:
            with self._lock:
                child = self._running()
                descriptors = (theirs.fileno(), held, status, *memory_files)
                with suppress(OSError):  # if it has just exited, the pipes report that
                    socket.send_fds(child.socket, [msgspec.msgpack.encode(wanted)], descriptors)
        finally:
            theirs.close()
            os.close(held)
            os.close(status)
        return SupervisorLink(ours, lifeline, report, child)

    def kill(self) -> None:
        """Kill the process and its supervisors."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Stop the process and its supervisors, and wait until it has exited."""
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
    """The fork servers of the two types of workers.

    `readers`, for headers and documents, start quickly because they do not import torch.
    """

    readers: ForkServer = field(default_factory=lambda: ForkServer(decodes=False))
    decoders: ForkServer = field(default_factory=lambda: ForkServer(decodes=True))

    @classmethod
    def preloading(cls, own: OwnPixels | None) -> ForkServers:
        """Create fork servers whose decoders load a model family's preprocessing operation,
        `own`.
        """
        return cls(decoders=ForkServer(True, own))

    def start(self) -> None:
        self.readers.start()
        self.decoders.start()

    def close(self) -> None:
        self.readers.close()
        self.decoders.close()


async def _readable(pipe: int) -> None:
    """Wait until a pipe has data, or its write end is closed."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pipe)
