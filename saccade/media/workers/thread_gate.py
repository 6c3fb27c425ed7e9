"""Limits the threads of an image worker with a seccomp user notification for each `clone`.

libde265, which decodes HEIC, starts a thread per tile. No rlimit counts the threads of one process
(RLIMIT_NPROC counts the threads of a user, and exempts root). So before a worker is sandboxed, it
sends a seccomp listener to its supervisor, which then allows or denies each `clone`. `sandbox.py`
restricts its flags.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

from saccade.media.workers.sandbox import (
    BPF_JEQ,
    BPF_LD_ABS,
    BPF_RET,
    NR_OFFSET,
    SECCOMP_RET_ALLOW,
    Instruction,
    install,
    set_no_new_privs,
    syscall_table,
)

SECCOMP_RET_USER_NOTIF = 0x7FC0_0000
SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3
SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND = 0xC050_2100, 0xC018_2101
SECCOMP_USER_NOTIF_FLAG_CONTINUE = 1
NOTIFICATION, RESPONSE = struct.Struct("<Q72x"), struct.Struct("<QqiI")
PAYLOAD = b"-"
"""The message with which the listener is sent. It has no listener if the kernel does not support
one.
"""
MAX_THREADS = 8
"""The maximum number of threads of a worker at a time, including its main thread."""
MAX_DENIED = 64
"""After this many denied threads, a worker is killed. An ordinary decoder would give up earlier."""


def send_listener_fd(connection: socket.socket) -> bool:
    """Install the seccomp listener and send its file descriptor over `connection`.

    Returns False if the kernel does not support it.
    """
    try:
        listener = _listen()
    except OSError:
        connection.sendall(PAYLOAD)
        return False
    socket.send_fds(connection, [PAYLOAD], [listener])
    os.close(listener)
    return True


def receive_listener(connection: socket.socket, pid: int) -> ThreadGate | None:
    """Receive the listener from `send_listener_fd`.

    Returns None if the kernel does not support it. The worker can then start no threads.
    """
    try:
        _, listeners, _, _ = socket.recv_fds(connection, len(PAYLOAD), 1)
    except OSError:  # the process has exited
        return None
    return ThreadGate(listeners[0], pid) if listeners else None


def _listen() -> int:
    """Install a filter that notifies a listener of each `clone`. Return the listener's file
    descriptor.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs(libc)
    program: list[Instruction] = [
        (BPF_LD_ABS, 0, 0, NR_OFFSET),
        (BPF_JEQ, 0, 1, syscall_table().threads["clone"]),
        (BPF_RET, 0, 0, SECCOMP_RET_USER_NOTIF),
        (BPF_RET, 0, 0, SECCOMP_RET_ALLOW),
    ]
    return install(libc, program, SECCOMP_FILTER_FLAG_NEW_LISTENER)


class ThreadGate:
    """Allows or denies the threads of one worker, in the supervisor."""

    def __init__(self, listener: int, pid: int) -> None:
        self._listener = listener
        self._tasks = f"/proc/{pid}/task"
        self._notifications = 0

    def fileno(self) -> int:
        return self._listener

    def begin_order(self) -> None:
        self._notifications = 0

    def answer(self, max_threads: int) -> bool:
        """Allow or deny the start of a thread.

        Up to `max_threads` per order are allowed, and at most `MAX_THREADS` at a time. Returns
        False if so many were denied that the worker must be killed.
        """
        notification = bytearray(NOTIFICATION.size)
        self._notifications += 1
        try:
            fcntl.ioctl(self._listener, SECCOMP_IOCTL_NOTIF_RECV, notification)
            allowed = (
                self._notifications <= max_threads and len(os.listdir(self._tasks)) < MAX_THREADS  # noqa: PTH208
            )
            (id_,) = NOTIFICATION.unpack(notification)
            reply = RESPONSE.pack(
                id_,
                0,
                0 if allowed else -errno.EAGAIN,
                SECCOMP_USER_NOTIF_FLAG_CONTINUE if allowed else 0,
            )
            fcntl.ioctl(self._listener, SECCOMP_IOCTL_NOTIF_SEND, reply)
        except OSError:  # the worker has exited in the meantime
            return True
        return self._notifications <= max_threads + MAX_DENIED

    def close(self) -> None:
        os.close(self._listener)
