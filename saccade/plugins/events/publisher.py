"""Publishes batches of events with sequence numbers from a thread, and replays missed batches.

The engine only appends to a queue. If the queue is full, events are dropped and counted, and a
sequence number is skipped, so that readers notice. ZeroMQ drops batches for a reader that is too
slow. The reader notices the gap in the same way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import zmq

from saccade.core.errors import StartupError
from saccade.plugins.events.schema import Event, EventBatch, merged

MAX_PENDING = 100_000
"""Maximum events in the queue."""
MAX_BATCH = 1000
"""Maximum events in a batch, so that a message has at most a few MiB."""
MAX_UNREAD = 10_000
"""Maximum batches that are queued for one reader."""
MAX_BUFFER_BYTES = 64 << 20
CLOSE_SECONDS = 1.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a publisher. If `replay` is None, it does not replay missed batches."""

    publish: str
    replay: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000


class Publisher:
    """Publishes the events of one cache. The engine calls `put`, and a thread sends the events.

    Sequence numbers start at the current time in nanoseconds, so they are higher than those of an
    earlier server. A reader that has missed a restart notices a gap, and its replay starts with
    `cleared`, the first event.
    """

    def __init__(self, endpoints: Endpoints, cleared: Event) -> None:
        """Open the sockets and start the thread. Raises StartupError."""
        self.accepted = 1  # counts `cleared`
        self.dropped = 0
        self.published = 0
        self._topic = endpoints.topic.encode()
        self._pending: deque[Event] = deque((cleared,))
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._buffered_bytes = 0
        self._buffer_steps = endpoints.buffer_steps
        self._next = time.time_ns()
        self._closing = False
        self._wake = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._events = _open(self._context, zmq.PUB, endpoints.publish, MAX_UNREAD)
        self._replays: zmq.Socket[bytes] | None = None
        if endpoints.replay is not None:
            # Space for a full replay and its end. ZeroMQ frees space in steps of half a queue.
            hwm = 2 * (endpoints.buffer_steps + 1)
            self._replays = _open(self._context, zmq.ROUTER, endpoints.replay, hwm, bind=True)
        self.endpoint = self._events.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = None
        if self._replays is not None:
            self.replay_endpoint = self._replays.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="saccade-events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event, without blocking."""
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        self.accepted += 1
        self._pending.append(event)
        if len(self._pending) == 1:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued events, within `CLOSE_SECONDS`."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        counted = 0
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._pending:
                if (dropped := self.dropped) != counted:
                    counted, self._next = dropped, self._next + 1
                self._publish()
            if self._replays in ready:
                self._replay()
            if self._closing and not self._pending:
                break
        self._context.destroy(linger=int(CLOSE_SECONDS * 1000))
        os.close(self._wake)

    def _publish(self) -> None:
        events = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_BATCH))]
        count = len(events)
        payload = msgspec.msgpack.encode(EventBatch(time.time(), merged(events)))
        sequence = self._next.to_bytes(8, "big")
        self._next += 1
        self._buffer.append((sequence, payload))
        self._buffered_bytes += len(payload)
        while len(self._buffer) > self._buffer_steps or (
            self._buffered_bytes > MAX_BUFFER_BYTES and len(self._buffer) > 1
        ):
            self._buffered_bytes -= len(self._buffer.popleft()[1])
        self._events.send_multipart((self._topic, sequence, payload))
        self.published += count

    def _replay(self) -> None:
        """Answer a replay request with all buffered batches from the requested sequence number on,
        which is the last part of the message.
        """
        assert self._replays is not None
        *sender, first = self._replays.recv_multipart()
        if len(first) != len(END_OF_REPLAY):
            return
        for sequence, payload in self._buffer:
            if sequence >= first:
                self._replays.send_multipart((*sender, sequence, payload))
        self._replays.send_multipart((*sender, END_OF_REPLAY, b""))


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, hwm: int, bind: bool = False
) -> zmq.Socket[bytes]:
    """Open a ZeroMQ socket, and bind or connect it to `endpoint`.

    It is bound if `bind` is True, or if the endpoint is a wildcard or ipc address, as in vLLM.
    Otherwise it is connected. Raises StartupError if ZeroMQ rejects the endpoint.

    kind: the socket's type, such as `zmq.PUB`.
    hwm: the maximum number of queued messages.
    """
    socket = context.socket(kind)
    socket.set_hwm(hwm)
    socket.ipv6 = True
    try:
        if bind or "*" in endpoint or "[::]" in endpoint or endpoint.startswith("ipc://"):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise StartupError(f"events: {endpoint}: {error.strerror}") from None
    return socket
