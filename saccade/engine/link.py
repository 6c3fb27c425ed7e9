"""Between front and engine: the engine's process, the socket, the encoding of messages.

A message is two frames: the name of its type, and its fields as msgpack. The socket is a ZeroMQ
pair in a private folder that goes with the front. The arena's descriptor and the boot message are
inherited, so nothing else has a name. The engine dies with the front (PDEATHSIG), and the front
notices the engine's death at once (its process is awaited). Why it died, where it still could say
so, stands in a pipe that only last words go through: they can be spoken while the engine's main
thread hangs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import zmq
import zmq.asyncio

from saccade.core.arena import Arena
from saccade.core.errors import EngineUnavailable, StartupError
from saccade.core.messages import Failed, Ready, Stop, ToEngine, ToFront
from saccade.core.options import EngineOptions, ModelOptions, ParallelOptions, engine_environment

T = TypeVar("T")

_TO_ENGINE = {kind.__name__.encode(): msgspec.msgpack.Decoder(kind) for kind in get_args(ToEngine)}
_TO_FRONT = {kind.__name__.encode(): msgspec.msgpack.Decoder(kind) for kind in get_args(ToFront)}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToEngine | ToFront) -> list[bytes]:
    """The two frames of a message."""
    return [type(message).__name__.encode(), _ENCODER.encode(message)]


@dataclass(frozen=True, slots=True)
class Boot:
    """What the engine process needs to know before it can listen; it reads this from its standard
    input.
    """

    parent: int
    address: str
    arena_fd: int
    arena_bytes: int
    words_fd: int
    folder: str
    model: ModelOptions
    engine: EngineOptions
    parallel: ParallelOptions


class EngineLink:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, message: ToFront) -> None:
        self._socket.send_multipart(encode(message))

    def receive(self, wait: float | None) -> Iterator[ToEngine]:
        """Messages that are here; if none is, waits up to `wait` seconds (None: until one
        comes).
        """
        if not self._socket.poll(None if wait is None else int(wait * 1000)):
            return
        with suppress(zmq.Again):
            while True:
                kind, body = self._socket.recv_multipart(zmq.NOBLOCK)
                yield _TO_ENGINE[kind].decode(body)

    def close(self) -> None:
        """Deliver what was sent, then close."""
        self._context.destroy(linger=2000)


class EngineProcess:
    """The front's end: starts the engine process, talks to it, notices its death."""

    def __init__(
        self,
        folder: Path,
        model: ModelOptions,
        engine: EngineOptions,
        parallel: ParallelOptions,
        arena: Arena,
    ) -> None:
        self._boot = (folder, model, engine, parallel, arena)
        self._process: subprocess.Popen[bytes] | None = None
        self._died = asyncio.Event()
        self._reason = "the engine is not running"

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises StartupError with the engine's reason.
        """
        folder, model, engine, parallel, arena = self._boot
        self._room = tempfile.TemporaryDirectory(prefix="saccade-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        address = f"ipc://{self._room.name}/engine"
        self._socket.bind(address)
        words, words_fd = os.pipe()
        boot = Boot(
            os.getpid(),
            address,
            arena.fd,
            arena.size,
            words_fd,
            str(folder),
            model,
            engine,
            parallel,
        )
        command = [sys.executable, "-m", "saccade.engine.process"]
        # A session of its own: Ctrl-C in the terminal is for the front, which then stops the engine
        # in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=(arena.fd, words_fd),
            start_new_session=True,
            env=engine_environment(),
        )
        os.close(words_fd)
        assert self._process.stdin is not None
        self._process.stdin.write(_ENCODER.encode(boot))
        self._process.stdin.close()
        self._watch = asyncio.create_task(self._watch_process(self._process, words))
        try:
            message = await self.receive()
        except EngineUnavailable as error:
            await self._clean_up()
            raise StartupError(error.message) from None
        if isinstance(message, Failed):
            await self._clean_up()
            raise StartupError(message.error)
        assert isinstance(message, Ready)
        return message

    async def _watch_process(self, process: subprocess.Popen[bytes], words: int) -> None:
        # A pidfd becomes readable when the process ends: no polling, no thread.
        fd = os.pidfd_open(process.pid)
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        code = process.wait()
        with open(words, "rb") as pipe:  # the engine was the only writer
            said = pipe.read().decode()
        ended = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
        self._reason = f"the engine failed: {said}" if said else f"the engine process {ended}"
        self._died.set()

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._died.is_set()

    @property
    def pid(self) -> int:
        """Process id of the engine. Only after `start`."""
        assert self._process is not None
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. Raises EngineUnavailable when the engine is dead."""
        if not self.alive:
            raise EngineUnavailable(self._reason)
        self._socket.send_multipart(encode(message))

    async def receive(self) -> ToFront:
        """The next message.

        Raises EngineUnavailable once the engine is dead and everything it sent has been read.
        """
        incoming = asyncio.ensure_future(self._socket.recv_multipart())
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((incoming, died), return_when=asyncio.FIRST_COMPLETED)
            if not incoming.done():
                # Its last words may still be on the way.
                await asyncio.wait((incoming,), timeout=0.2)
            if not incoming.done():
                raise EngineUnavailable(self._reason)
            kind, body = incoming.result()
            message: ToFront = _TO_FRONT[kind].decode(body)
            return message
        finally:
            died.cancel()
            if not incoming.done():
                incoming.cancel()

    async def stop(self, grace: float) -> None:
        """Ask the engine to finish what runs, for up to `grace` seconds; then end it whatever it
        does.
        """
        if self._process is None:
            return
        if self.alive:
            self.send(Stop(grace))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._died.wait(), grace + 5.0)
        await self._clean_up()

    async def _clean_up(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        await self._died.wait()
        self._context.destroy(linger=0)
        self._room.cleanup()
