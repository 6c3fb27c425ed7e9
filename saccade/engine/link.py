"""The engine from the front end's point of view. This module starts the engine process, exchanges
messages with it, and monitors it.

The engine is killed when the front end exits. The front end notices at once if the engine exits,
and within seconds if it hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from saccade.core.arena import Arena
from saccade.core.config import Role
from saccade.core.errors import EngineUnavailable, StartupError
from saccade.core.options import (
    CacheOptions,
    EngineOptions,
    ModelOptions,
)
from saccade.core.settings import EngineSettings
from saccade.ipc.boots import EngineBoot
from saccade.ipc.child import HEARTBEAT_SECONDS, AsyncChannel, Child, Disconnected, HeartbeatMonitor
from saccade.ipc.environment import engine_environment
from saccade.ipc.messages import (
    FRONT_END,
    Failed,
    Heartbeat,
    Loading,
    Ready,
    ServeModel,
    Stop,
    ToEngine,
    ToFront,
)

MODULE = "saccade.engine.main"
NO_PLUGINS: Mapping[str, dict[str, Any]] = MappingProxyType({})
SILENT_SECONDS = 3.0
"""Time without a heartbeat after which the engine counts as hanging."""
END_SECONDS = 5.0
"""Time for an engine to stop its workers and exit, after which it is killed."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlyEngine:
    """An engine process that was started before its model is known, with the file descriptor of its
    arena.

    As a context manager, it kills the process on exit if the process is still running.
    """

    child: Child
    arena_fd: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end_sync()


def begin_engine(ranks: int, arena_fd: int | None = None) -> EarlyEngine:
    """Start an engine process and its workers, while the front end continues with its imports.

    All are killed when the calling thread exits.
    """
    arena_fd = Arena.reserve() if arena_fd is None else arena_fd
    boot = EngineBoot(arena_fd, ranks)
    child = Child.spawn(MODULE, boot, (arena_fd,), environment=engine_environment())
    return EarlyEngine(child, arena_fd)


class EngineProcess:
    """Starts, monitors and stops an engine process. Only one task may call `receive`."""

    def __init__(
        self,
        folder: Path,
        model: ModelOptions,
        engine: EngineOptions,
        arena: Arena,
        caches: CacheOptions = CacheOptions(),  # noqa: B008 - frozen
        role: Role = "all",
        settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
        early: EarlyEngine | None = None,
        plugins: Mapping[str, dict[str, Any]] = NO_PLUGINS,
    ) -> None:
        """Store the options for `start`.

        early: the process if it has already been started with the memory of `arena`, otherwise
            None.
        plugins: as in `messages.ServeModel`.
        """
        decided = str(folder), model, engine, arena.size, caches, role, settings
        self._served = ServeModel(*decided, dict(plugins))
        self._arena_fd = arena.fd
        self._early = early
        self._child: Child | None = None
        self._channel: AsyncChannel[ToEngine, ToFront] | None = None
        self._silence = HeartbeatMonitor()
        self._overdue = ""
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, on_progress: Callable[[Loading], None]) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises StartupError with the reason that the engine sent.

        on_progress: called with the progress of loading.
        """
        early = self._early or begin_engine(self._served.settings.parallel.ranks, self._arena_fd)
        self._child = early.child
        self._channel = await AsyncChannel.open(self._child.socket, FRONT_END)
        self._channel.send(self._served)
        try:
            while isinstance(message := await self.receive(), Loading):
                on_progress(message)
        except EngineUnavailable as error:
            raise StartupError(error.message) from None
        if isinstance(message, Failed):
            await self._child.end(END_SECONDS)
            raise StartupError(message.error)
        assert isinstance(message, Ready)
        self._ticking = asyncio.create_task(self._tick())
        return message

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._silence.tick()

    @property
    def pid(self) -> int:
        """The engine's process id. Available only after `start`."""
        assert self._child is not None
        return self._child.pid

    @property
    def stall(self) -> str:
        """The reason why a running engine makes no progress, or "" if it does."""
        if self._silence.seconds > SILENT_SECONDS:
            return f"no heartbeat from the engine for {self._silence.seconds:.0f} s"
        return self._overdue

    def send(self, message: ToEngine) -> None:
        """Queue a message without blocking. Raises EngineUnavailable if the engine has exited."""
        if self._child is None or self._channel is None or self._channel.over:
            raise EngineUnavailable(self._reason)
        self._channel.send(message)

    async def receive(self) -> ToFront:
        """Wait for the next message that is not a heartbeat, and return it.

        Raises EngineUnavailable once the engine has exited and all of its messages have been
        received.
        """
        if self._child is None or self._channel is None:
            raise EngineUnavailable(self._reason)
        try:
            while isinstance(message := await self._channel.receive(), Heartbeat):
                self._silence.heard()
                self._overdue = message.overdue
        except Disconnected:
            await self._child.end(END_SECONDS)
            raise EngineUnavailable(self._reason) from None
        self._silence.heard()
        return message

    async def stop(self, grace: float) -> None:
        """Stop the engine, which has `grace` seconds to finish running requests."""
        if self._child is None or self._channel is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
        self._channel.send(Stop(grace))
        # A process that is still loading reads no messages and has nothing to clean up.
        hears = self._ticking is not None and not self.stall
        await self._child.end(grace + END_SECONDS if hears else 0.0)
        self._channel.close()

    @property
    def _reason(self) -> str:
        if self._child is None:
            return "the engine is not running"
        return f"the engine process {self._child.ending}"
