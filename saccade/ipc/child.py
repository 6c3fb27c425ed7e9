"""Child processes of a server: start and stop them, exchange messages with them, and detect their
exit. This module starts every process of a server.

A child runs a module in a new session, with the root directory as its working directory. It
inherits one end of a socket pair, a pipe for its exit message, and the file descriptors that its
first message (`boot`) refers to, so no path in the file system is needed. A message on the socket
is a frame: length, type, msgpack fields. The type is the index of the message's class in a list
that both processes have. If the parent exits, the kernel kills the child. If the child exits, a
pidfd notifies the parent at once.
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
"""Interval of heartbeats in both directions while no other message is sent."""
LAST_WORDS_BYTES = 4096
"""Maximum size of an exit message, in bytes. Writing this much to a pipe (PIPE_BUF) is atomic, and
does not wait for a reader.
"""

STARTER = "saccade.ipc.starter"
"""The module that a child runs first. It makes the kernel kill the child when its parent exits,
then runs the module that the child was started for.
"""

_HEADER = struct.Struct("<IB")
_ENCODER = msgspec.msgpack.Encoder()

Sent = TypeVar("Sent")
Received = TypeVar("Received")
Boot = TypeVar("Boot")


class Disconnected(Exception):
    """The other process has closed its socket or exited, and all messages that it sent before were
    received.
    """


class Codec(Generic[Sent, Received]):
    """Encodes the messages that one process sends, and decodes those that it receives.

    Each argument of the constructor is a dataclass or a union of dataclasses.
    """

    def __init__(self, sent: Any, received: Any) -> None:
        self._kinds = {kind: number for number, kind in enumerate(_members(sent))}
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgpack_decoder(kind) for kind in _members(received)
        ]

    def encode(self, message: Sent) -> bytes:
        """Return the message as a frame: length, type and msgpack fields."""
        body = _ENCODER.encode(message)
        return _HEADER.pack(len(body), self._kinds[type(message)]) + body

    def decode(self, kind: int, body: bytes | bytearray | memoryview) -> Received:
        message: Received = self._decoders[kind].decode(body)
        return message


class Frames(Generic[Sent, Received]):
    """Splits a stream of bytes into messages. The bytes may arrive in chunks of any size."""

    def __init__(self, codec: Codec[Sent, Received], longest: int | None = None) -> None:
        """Create a splitter without buffered bytes.

        longest: the maximum size of a message in bytes. Set it if the sender is not trusted.
        """
        self._codec = codec
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Received]:
        """Add received bytes, and return the messages that are now complete.

        Raises ValueError if a message is longer than the maximum, and msgspec's errors if one
        cannot be decoded.
        """
        buffer = self._buffer
        buffer += data
        found: list[Received] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(buffer, start)
            if self._longest is not None and length > self._longest:
                raise ValueError(f"a message has {length} bytes; the limit is {self._longest}")
            begin = start + _HEADER.size
            if len(buffer) - begin < length:
                break
            found.append(self._codec.decode(kind, buffer[begin : begin + length]))
            start = begin + length
        del buffer[:start]
        return found


class Channel(Generic[Sent, Received]):
    """One end of a socket pair, with blocking calls, for a process without an event loop. Any
    thread may send. Only one thread may receive.
    """

    def __init__(self, connection: socket.socket, codec: Codec[Sent, Received]) -> None:
        self._socket = connection
        self._codec = codec
        self._sending = threading.Lock()
        self._poll = poll()
        self._poll.register(connection, POLLIN)

    def send(self, message: Sent) -> None:
        """Send a message, and return once the kernel has accepted all of it. Raises
        Disconnected.
        """
        frame = self._codec.encode(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> Received:
        """Wait for the next message and return it. Raises Disconnected."""
        length, kind = _HEADER.unpack(_read(self._socket, _HEADER.size))
        return self._codec.decode(kind, _read(self._socket, length))

    def waiting(self, seconds: float | None = 0.0) -> bool:
        """Wait up to `seconds` (None: without a limit) until a message arrives or the other process
        disconnects.

        Returns True if one of these has happened, so that `receive` does not block.
        """
        return bool(self._poll.poll(None if seconds is None else seconds * 1e3))

    def close(self) -> None:
        self._socket.close()


class AsyncChannel(asyncio.Protocol, Generic[Sent, Received]):
    """One end of a socket pair on an event loop. Sending never blocks. Only one task may
    receive.
    """

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
        """Open a channel on the running event loop. It takes ownership of the socket.

        arrived: an event that is set when there are new messages for `take_messages`, and when the
        other process disconnects (`over`). Several channels may share one event. By default, the
        channel has its own event.
        """
        loop = asyncio.get_running_loop()
        channel: AsyncChannel[Sent, Received] = cls(codec, arrived)
        await loop.create_unix_connection(lambda: channel, sock=connection)
        return channel

    def send(self, message: Sent) -> None:
        """Queue a message. It is dropped if the other process has disconnected, in which case
        `receive` raises Disconnected.
        """
        self.write(self._codec.encode(message))

    def write(self, frame: bytes) -> None:
        """Queue a frame from `Codec.encode`. Use this to encode a message once and send it on
        several channels.
        """
        if self._transport is not None and not self.over:
            self._transport.write(frame)

    async def receive(self) -> Received:
        """Wait for the next message and return it. Raises Disconnected."""
        while not self._messages:
            if self.over:
                raise Disconnected
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def take_messages(self) -> list[Received]:
        """Remove and return the messages received so far."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    @property
    def unsent_bytes(self) -> int:
        """The number of queued bytes that the other process has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self) -> None:
        """Start to close the channel, and return at once. Queued messages are still sent."""
        if self._transport is not None:
            self._transport.close()

    async def flush(self, seconds: float) -> None:
        """Close the channel, and wait up to `seconds` until its queued messages have been sent."""
        self.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not an isinstance check: uvloop's transport is not a subclass of
        # asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

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
    """Measures the time since the last heartbeat from another process.

    Time in which this process was itself suspended does not count, for example while the whole
    machine sleeps.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked: float | None = None

    def heard(self) -> None:
        self.seconds = 0.0

    def tick(self) -> None:
        """Add the time since the previous call. Call this every `HEARTBEAT_SECONDS`, after handling
        all received messages.
        """
        now = time.monotonic()
        if self._ticked is not None:
            self.seconds += min(now - self._ticked, 2 * HEARTBEAT_SECONDS)
        self._ticked = now


class Child:
    """A process that this process has started. `wait`, `wait_sync` and `status` report its exit."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, words: int
    ) -> None:
        self.pid = process.pid
        self.socket = connection
        self._process = process
        self._exit_pipe = words
        self._pidfd = os.pidfd_open(process.pid)
        self._exit_message: str | None = None

    @classmethod
    def spawn(
        cls,
        module: str,
        boot: object,
        inherit: Iterable[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process that runs `module`, which must call `enter`.

        boot: the first message, a dataclass.
        inherit: file descriptors, which have the same numbers in the child.
        environment: None uses this process's environment.

        The kernel kills the child when the calling thread exits.
        """
        ours, theirs = socket.socketpair()
        words, words_fd = os.pipe()
        os.set_blocking(words, False)
        arguments = (theirs.fileno(), words_fd, os.getpid())
        try:
            # In a new session, Ctrl-C in a terminal reaches the front end only, which stops the
            # child.
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
        with suppress(OSError):  # the child has already exited, which `wait` and `status` report
            ours.sendall(_HEADER.pack(len(body), 0) + body)
        return child

    @property
    def status(self) -> int | None:
        """The exit status, which is negative for a fatal signal, or None while the child is
        running.
        """
        return self._process.poll()

    @property
    def ending(self) -> str:
        """A description of how the child has ended, to follow its name in a sentence. It includes
        the exit message if the child wrote one.
        """
        status = self._process.poll()
        if self._exit_message is None:
            with suppress(OSError):
                self._exit_message = os.read(self._exit_pipe, LAST_WORDS_BYTES).decode(
                    errors="replace"
                )
        if self._exit_message:
            return f"failed: {self._exit_message}"
        if status is None:
            return "is running"
        return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"

    async def wait(self) -> int:
        """Wait for the child to exit and return its exit status."""
        if (status := self.status) is not None:
            return status
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        # Duplicated for this call, because an event loop allows only one reader per descriptor.
        pidfd = os.dup(self._pidfd)
        loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def wait_sync(self, seconds: float | None = None) -> int | None:
        """Wait for the exit status. Returns None if the child is still running after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Send SIGKILL to the child. A no-op if it has exited."""
        if self._process.poll() is None:
            self._process.kill()

    async def end(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for the child to exit, then kill it. Close the file
        descriptors for it.
        """
        try:
            async with asyncio.timeout(patience):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        self.release()

    def end_sync(self) -> None:
        """Kill the child, wait until it has exited, and close the file descriptors for it. For use
        without an event loop.
        """
        self.kill()
        self.wait_sync()
        self.release()

    def release(self) -> None:
        """Close all file descriptors for the child. `ending` still returns the exit message."""
        if self._pidfd < 0:
            return
        assert self.ending
        self.socket.close()
        os.close(self._pidfd)
        os.close(self._exit_pipe)
        self._pidfd = self._exit_pipe = -1


class ParentLink:
    """A child's connection to its parent: the socket for messages, and the pipe for the exit
    message.
    """

    def __init__(self, connection: socket.socket, words: int) -> None:
        self.socket = connection
        self._exit_pipe = words

    def give_up(self, why: str) -> NoReturn:
        """Send `why` to the parent as the exit message, and exit with status 1. Works in any
        thread, even if other threads hang.
        """
        self.say(why)
        os._exit(1)

    def say(self, why: str) -> None:
        """Send `why` to the parent as the exit message. The caller then exits with its own
        status.
        """
        with suppress(OSError):
            os.write(self._exit_pipe, why.encode()[:LAST_WORDS_BYTES])


def tie(parent: int) -> None:
    """Have the kernel kill this process when its parent, whose pid is `parent`, exits.

    SIGINT and SIGTERM are ignored. The front end handles Ctrl-C and stop signals to the whole
    process group, and stops its children in order.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with(parent)


def enter(boot: type[Boot]) -> tuple[Boot, ParentLink]:
    """Receive the first message from the parent, of type `boot`, and return it with the connection.

    The main function of a child calls this first, after all imports.
    """
    end_imports()
    connection, words = map(int, sys.argv[1:3])
    # The children of this process must not inherit these.
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
