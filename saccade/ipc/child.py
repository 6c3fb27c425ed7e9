"""Child processes that are parts of a server: the only way to start one, talk to it, learn of its
death and end it.

A child is a module, run in a session of its own and in the root folder. It inherits one end of a
socket pair, a pipe for its last words, and the descriptors named by its boot message. So nothing
has a name in any folder. Messages are frames: length, kind, msgpack fields. The kind is the index
of the message's type in a list shared by both ends. The kernel kills a child whose parent exits,
and a pidfd reports a child's end to the parent at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from select import POLLIN, poll
from typing import Any, Generic, NoReturn, TypeVar, cast, get_args

import msgspec

from saccade.core.decoders import msgpack_decoder
from saccade.ipc.memory import end_imports
from saccade.ipc.python import start_python
from saccade.ipc.tied import end_with

HEARTBEAT_SECONDS = 0.5
"""An end that has nothing else to say gives a sign of life this often."""
LAST_WORDS_BYTES = 4096
"""A pipe takes so much in one piece, and without waiting for a reader."""

STARTER = "saccade.ipc.starter"
"""Ties the child to its parent, then becomes the module."""

_HEADER = struct.Struct("<IB")
_ENCODER = msgspec.msgpack.Encoder()

Sent = TypeVar("Sent")
Received = TypeVar("Received")
Boot = TypeVar("Boot")


class Disconnected(Exception):
    """The other end has closed its socket or died, and everything sent before has been read."""


class Codec(Generic[Sent, Received]):
    """One end's message types, sent and received. Each argument is a dataclass or a union of
    dataclasses.
    """

    def __init__(self, sent: Any, received: Any) -> None:
        self._kinds = {kind: number for number, kind in enumerate(_members(sent))}
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgpack_decoder(kind) for kind in _members(received)
        ]

    def encode(self, message: Sent) -> bytes:
        """Return a message's frame."""
        body = _ENCODER.encode(message)
        return _HEADER.pack(len(body), self._kinds[type(message)]) + body

    def decode(self, kind: int, body: bytes | bytearray | memoryview) -> Received:
        message: Received = self._decoders[kind].decode(body)
        return message


class Frames(Generic[Sent, Received]):
    """The received part of a frame stream, cut anywhere."""

    def __init__(self, codec: Codec[Sent, Received], longest: int | None = None) -> None:
        """Set `longest`, the bytes that a message may have, where the other end is untrusted."""
        self._codec = codec
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Received]:
        """Return the messages that are complete now.

        Raises ValueError for a frame that is too long, and decoding errors.
        """
        buffer = self._buffer
        buffer += data
        found: list[Received] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(buffer, start)
            if self._longest is not None and length > self._longest:
                raise ValueError(f"a message of {length} bytes; the limit is {self._longest}")
            begin = start + _HEADER.size
            if len(buffer) - begin < length:
                break
            found.append(self._codec.decode(kind, buffer[begin : begin + length]))
            start = begin + length
        del buffer[:start]
        return found


class Channel(Generic[Sent, Received]):
    """The blocking end, for a computing process. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, codec: Codec[Sent, Received]) -> None:
        self._socket = connection
        self._codec = codec
        self._sending = threading.Lock()
        self._poll = poll()
        self._poll.register(connection, POLLIN)

    def send(self, message: Sent) -> None:
        """Send a message. Returns once the kernel has all of it. Raises Disconnected."""
        frame = self._codec.encode(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> Received:
        """Wait for the next message. Raises Disconnected."""
        length, kind = _HEADER.unpack(_read(self._socket, _HEADER.size))
        return self._codec.decode(kind, _read(self._socket, length))

    def waiting(self, seconds: float | None = 0.0) -> bool:
        """Wait up to `seconds` (None: without end) for a message or the other end's departure.

        Returns True if `receive` has either to report.
        """
        return bool(self._poll.poll(None if seconds is None else seconds * 1e3))

    def close(self) -> None:
        self._socket.close()


class AsyncChannel(asyncio.Protocol, Generic[Sent, Received]):
    """An event loop's end. Sending never blocks; one task receives."""

    def __init__(self, codec: Codec[Sent, Received], arrived: asyncio.Event | None = None) -> None:
        self.over = False
        self._codec = codec
        self._frames = Frames(codec)
        self._messages: deque[Received] = deque()
        self._arrived = arrived or asyncio.Event()
        self._closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        connection: socket.socket,
        codec: Codec[Sent, Received],
        arrived: asyncio.Event | None = None,
    ) -> AsyncChannel[Sent, Received]:
        """Open an end on the running loop, which takes over the socket.

        `arrived` is set on new messages for `take_messages` and on the other end's departure
        (`over`); several channels may share one event. Without `arrived`, `receive` waits for this
        channel alone.
        """
        loop = asyncio.get_running_loop()
        channel: AsyncChannel[Sent, Received] = cls(codec, arrived)
        await loop.create_unix_connection(lambda: channel, sock=connection)
        return channel

    def send(self, message: Sent) -> None:
        """Queue a message. If the other end has left, drop it: `receive` reports the departure."""
        self.write(self._codec.encode(message))

    def write(self, frame: bytes) -> None:
        """Queue a frame made by `Codec.encode`, to send one message to many."""
        if self._transport is not None and not self.over:
            self._transport.write(frame)

    async def receive(self) -> Received:
        """Wait for the next message. Raises Disconnected."""
        while not self._messages:
            if self.over:
                raise Disconnected
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def take_messages(self) -> list[Received]:
        """Take the messages received so far."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that wait for the other end to read."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        """Send the queued messages, then close, in the background."""
        if self._transport is not None:
            self._transport.close()

    async def flush(self, seconds: float) -> None:
        """Close, and wait up to `seconds` until the other end has all that was sent."""
        self.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # by its methods: uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        found = self._frames.feed(data)
        self._messages += found
        if found:
            self._arrived.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.over = True
        self._closed.set()
        self._arrived.set()


class HeartbeatMonitor:
    """The time since the other end's last sign of life.

    Only time while this process itself was awake counts, so a pause of the whole machine is left
    out.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked: float | None = None

    def heard(self) -> None:
        self.seconds = 0.0

    def tick(self) -> None:
        """Count a heartbeat. Call every `HEARTBEAT_SECONDS`, after reading all arrived messages."""
        now = time.monotonic()
        if self._ticked is not None:
            self.seconds += min(now - self._ticked, 2 * HEARTBEAT_SECONDS)
        self._ticked = now


class Child:
    """A process started by this process. `wait`, `wait_sync` and `status` report its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, words: int
    ) -> None:
        self.pid = process.pid
        self.socket = connection
        self._process = process
        self._words = words
        self._pidfd = os.pidfd_open(process.pid)
        self._said: str | None = None

    @classmethod
    def spawn(
        cls,
        module: str,
        boot: object,
        inherit: Iterable[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process that runs `module`, which must call `enter`. `boot` is a dataclass.

        The child keeps the descriptors `inherit` under the same numbers, and dies with the calling
        thread.
        """
        ours, theirs = socket.socketpair()
        words, words_fd = os.pipe()
        os.set_blocking(words, False)
        arguments = (theirs.fileno(), words_fd, os.getpid())
        try:
            # A session of its own: Ctrl-C in a terminal is for the front.
            process = start_python(
                STARTER,
                module,
                *map(str, arguments),
                environment=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), words_fd, *inherit),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(words)
            raise
        finally:
            theirs.close()
            os.close(words_fd)
        child = cls(process, ours, words)
        body = _ENCODER.encode(boot)
        with suppress(OSError):  # it has died already: whoever waits for it will see
            ours.sendall(_HEADER.pack(len(body), 0) + body)
        return child

    @property
    def status(self) -> int | None:
        """Return the exit status, negative for a fatal signal, or None while the child runs."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """Describe the child's end as the rest of a sentence, with its last words if it had any."""
        status = self._process.poll()
        if self._said is None:
            with suppress(OSError):
                self._said = os.read(self._words, LAST_WORDS_BYTES).decode(errors="replace")
        if self._said:
            return f"failed: {self._said}"
        if status is None:
            return "is running"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    async def wait(self) -> int:
        """Wait for the child to end and return its exit status."""
        if (status := self.status) is not None:
            return status
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        # A descriptor of this call alone: an event loop knows one reader for each.
        pidfd = os.dup(self._pidfd)
        loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def wait_sync(self, seconds: float | None = None) -> int | None:
        """Wait for the exit status. Returns None if the child runs on after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill the child at once, whatever its state."""
        if self._process.poll() is None:
            self._process.kill()

    async def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the child to end, then kill it. Releases it once it has
        ended.
        """
        try:
            async with asyncio.timeout(patience):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        self.release()

    def end_sync(self, patience: float = 0.0) -> None:
        """End the child as `end` does, without an event loop."""
        if self.wait_sync(patience) is None:
            self.kill()
            self.wait_sync()
        self.release()

    def release(self) -> None:
        """Close all descriptors. The last words are kept."""
        if self._pidfd < 0:
            return
        assert self.ending
        self.socket.close()
        os.close(self._pidfd)
        os.close(self._words)
        self._pidfd = self._words = -1


class ParentLink:
    """The child's link to its parent: the socket, and the pipe for last words."""

    def __init__(self, connection: socket.socket, words: int) -> None:
        self.socket = connection
        self._words = words

    def give_up(self, why: str) -> NoReturn:
        """End this process with status 1 from any thread, even if other threads hang.

        The parent reads `why`.
        """
        self.say(why)
        os._exit(1)

    def say(self, why: str) -> None:
        """Write the last words of a process about to end with another status."""
        with suppress(OSError):
            os.write(self._words, why.encode()[:LAST_WORDS_BYTES])


def tie(parent: int) -> None:
    """End this process when its starter `parent` ends.

    The front handles Ctrl-C, and a stop signal sent to all processes. It ends its children in
    order.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with(parent)


def enter(boot: type[Boot]) -> tuple[Boot, ParentLink]:
    """Read the boot message. A child's main calls this first, when all is imported."""
    end_imports()
    connection, words = map(int, sys.argv[1:3])
    # Not for the children of this process.
    os.set_inheritable(connection, False)
    os.set_inheritable(words, False)
    link = ParentLink(socket.socket(fileno=connection), words)
    try:
        length, _ = _HEADER.unpack(_read(link.socket, _HEADER.size))
        return msgpack_decoder(boot).decode(_read(link.socket, length)), link
    except Disconnected:
        os._exit(1)


def _members(kinds: Any) -> tuple[type, ...]:
    return get_args(kinds) or (kinds,)


def _read(connection: socket.socket, length: int) -> bytearray:
    """Read exactly `length` bytes. Raises Disconnected."""
    data = bytearray(length)
    view, read = memoryview(data), 0
    while read < length:
        try:
            count = connection.recv_into(view[read:])
        except OSError as error:
            raise Disconnected from error
        if not count:
            raise Disconnected
        read += count
    return data
