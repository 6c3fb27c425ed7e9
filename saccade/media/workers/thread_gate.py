"""How many threads an image worker may begin: the kernel asks its supervisor for each.

libde265, which decodes HEIC, works in its own thread, one after another for each tile. The kernel
has no limit that bounds threads alone (RLIMIT_NPROC counts all that a user has, and leaves out
root's). So a worker, before giving up all else, hands a listener to the supervisor. From then on
each `clone` waits for the supervisor's word. `sandbox.py` decides on the kinds of clone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from saccade.media.workers.sandbox import (
    ALLOW,
    JUMP_IF_EQUAL,
    LOAD,
    NUMBER,
    RETURN,
    Step,
    install,
    machine,
    never_more_rights,
)

ASK = 0x7FC0_0000
"""What a filter answers so that a listener is asked."""
NEW_LISTENER = 1 << 3
RECEIVE, SEND = 0xC050_2100, 0xC018_2101
"""Of ioctl: what is asked, and the answer to it."""
GO_ON = 1
ASKED, ANSWER = struct.Struct("<Q72x"), struct.Struct("<QqiI")
NOBODY = b"-"
"""With a listener, or without one."""
AGAIN = 11
"""EAGAIN: what pthread_create fails with where there are too many."""

MOST_ALIVE = 8
"""Threads that a worker may have at a time, its first with them."""
SPARE = 64
"""Threads beyond an order's that a worker may ask for in vain: what asks on is no decoder."""


def hand_over(connection: socket.socket) -> bool:
    """Have the kernel ask the reader of `connection` before this process begins a thread. Returns
    True if the kernel does.
    """
    try:
        listener = _listen()
    except OSError:
        connection.sendall(NOBODY)
        return False
    socket.send_fds(connection, [NOBODY], [listener])
    os.close(listener)
    return True


def receive(connection: socket.socket, pid: int) -> ThreadGate | None:
    """Return the listener from `hand_over`, or `None` if the kernel cannot ask. Without a listener
    the worker gets no threads.
    """
    try:
        _, listeners, _, _ = socket.recv_fds(connection, len(NOBODY), 1)
    except OSError:  # the process has ended
        return None
    return ThreadGate(listeners[0], pid) if listeners else None


def _listen() -> int:
    """Install a filter that asks about each `clone`. Returns its listener. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    never_more_rights(libc)
    asking: list[Step] = [
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_EQUAL, 0, 1, machine().threads["clone"]),
        (RETURN, 0, 0, ASK),
        (RETURN, 0, 0, ALLOW),
    ]
    return install(libc, asking, NEW_LISTENER)


class ThreadGate:
    """A worker's listener, in the supervisor."""

    def __init__(self, listener: int, pid: int) -> None:
        self._listener = listener
        self._tasks = f"/proc/{pid}/task"
        self._asked = 0

    def fileno(self) -> int:
        return self._listener

    def begin_order(self) -> None:
        self._asked = 0

    def answer(self, most: int) -> bool:
        """Allow or deny the thread asked for. An order may have `most`. Returns False for a worker
        that asks too often and must end.
        """
        asked = bytearray(ASKED.size)
        self._asked += 1
        try:
            fcntl.ioctl(self._listener, RECEIVE, asked)
            may = self._asked <= most and len(os.listdir(self._tasks)) < MOST_ALIVE  # noqa: PTH208
            (number,) = ASKED.unpack(asked)
            reply = ANSWER.pack(number, 0, 0 if may else -AGAIN, GO_ON if may else 0)
            fcntl.ioctl(self._listener, SEND, reply)
        except OSError:  # the worker has ended meanwhile
            return True
        return self._asked <= most + SPARE

    def close(self) -> None:
        os.close(self._listener)
