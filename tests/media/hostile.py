"""Image workers that hostile bytes have taken over, for `test_sandbox.py`: a fork server as ours,
whose workers give up all that ours do, and then run an attack that the bytes of their order name.

Started as `python -m tests.media.hostile` in the place of `saccade.media.workers.supervisor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from saccade.ipc.child import Channel
from saccade.media.reasons import Reason
from saccade.media.workers import supervisor
from saccade.media.workers.orders import Answer, Decode, Decoded, Header, Order, WorkerReplaced
from saccade.media.workers.worker import WorkerResources

LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALLS = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "io_uring_setup": 425, "memfd_create": 319,
        "unshare": 272, "mount": 165, "bpf": 321, "userfaultfd": 323, "pidfd_open": 434,
        "openat": 257, "open": 2, "execve": 59, "clone3": 435, "fork": 57, "socket": 41,
        "sendmsg": 46, "recvmsg": 47, "write": 1, "truncate": 76, "ftruncate": 77, "kill": 62,
        "tgkill": 234, "prctl": 157, "seccomp": 317, "setuid": 105, "capset": 126, "shmget": 29,
        "keyctl": 250, "ioctl": 16, "unlink": 87, "perf_event_open": 298, "dup": 32, "pipe": 22,
        "vfork": 58, "clone": 56,
    },
}  # fmt: skip
"""What an attack may try by number."""
CALLS = SYSCALLS.get(os.uname().machine, {})


def raw(name: str) -> str:
    """A system call, with arguments that need not make sense."""
    number = CALLS[name]
    status = LIBC.syscall(number, 0, 0, 0, 0, 0)
    return "it worked" if status >= 0 else os.strerror(ctypes.get_errno())


def attempt(what: Callable[[], object]) -> str:
    try:
        return f"it worked: {what()!r}"
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def ignore(*_: object) -> None:
    pass


def descriptors(resources: WorkerResources) -> str:
    """Those that are open, and of each whether it can be made to hold something else."""
    found = []
    for number in range(4096):
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            continue
        try:
            mmap.mmap(number, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            found.append("memory to write")
        except (OSError, ValueError):
            found.append("the inbox" if number == resources.inbox else "else")
    return ", ".join(sorted(found))


def threads() -> str:
    begun = threading.Thread(target=ignore)
    begun.start()
    begun.join()
    return "a thread"


THREAD_FLAGS = 0x3D0F00
CLONES = {
    "a process": signal.SIGCHLD,
    "a process that shares memory": 0x100 | signal.SIGCHLD,
    "as vfork does": 0x4100 | signal.SIGCHLD,
    "a thread without the process's files": THREAD_FLAGS & ~0x400,
    "memory without a thread": THREAD_FLAGS & ~0x10000,
    "a thread and a descriptor of it": THREAD_FLAGS | 0x1000,
    "a thread nobody may trace": THREAD_FLAGS | 0x800000,
    "a sibling": THREAD_FLAGS & ~0x10800 | 0x8000,
    **{
        f"namespace {bit:#x}": THREAD_FLAGS | bit
        for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    },
    "a process in a user namespace": 0x10000000 | signal.SIGCHLD,
}
"""Flags of `clone` that no thread of glibc's has."""


def clone(flags: int) -> str:
    status = LIBC.syscall(CALLS["clone"], flags, 0, 0, 0, 0)
    return "it worked" if status >= 0 else os.strerror(ctypes.get_errno())


def clone3(flags: int) -> str:
    told = struct.pack("<11Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    status = LIBC.syscall(CALLS["clone3"], told, len(told))
    return "it worked" if status >= 0 else os.strerror(ctypes.get_errno())


def bomb() -> int:
    """Threads that stay, until there are no more; this one with them."""
    try:
        while True:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        return threading.active_count()


def endless() -> None:
    """Threads that end, and others for ever."""
    while True:
        with contextlib.suppress(RuntimeError):
            threads()


def grow() -> int:
    """As much memory as there is, of any kind."""
    resource.setrlimit(
        resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2
    )  # what is soft is no limit
    held = []
    while True:
        try:
            held.append(mmap.mmap(-1, 16 << 20))
        except OSError:
            return len(held) * 16


ATTACKS: dict[str, Callable[[WorkerResources], object]] = {
    "socket": lambda _: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "local socket": lambda _: socket.socketpair(),
    "read a file": lambda _: Path("/etc/passwd").read_bytes(),
    "write a file": lambda _: Path("/tmp/written-by-an-image").write_bytes(b""),
    "look at a file": lambda _: Path("/etc/passwd").stat(),
    "list a folder": lambda _: [*Path("/tmp").iterdir()],
    "own memory's map": lambda _: Path("/proc/self/maps").read_bytes(),
    "exec": lambda _: os.execv("/bin/true", ["true"]),
    "spawn": lambda _: subprocess.run(["/bin/true"], check=False),
    "fork": lambda _: os.fork(),
    "thread": lambda _: threads(),
    "kill the supervisor": lambda _: os.kill(int(os.environ.get("PARENT", "1")), 0),
    "memory to execute": lambda _: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "raise a hard limit": lambda _: resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 45)),
    "another's limits": lambda _: resource.prlimit(1, resource.RLIMIT_NOFILE),
    "a signal's owner": lambda resources: fcntl.fcntl(resources.inbox, fcntl.F_SETOWN, 1),
    "a larger outbox": lambda resources: len(bytes(resources.outbox[-1:])),
    "environment": lambda _: sorted(
        name for name in os.environ if "KEY" in name or "TOKEN" in name
    ),
    "descriptors": descriptors,
    "grow": lambda _: grow(),
}
OF_THREADS: dict[str, Callable[[WorkerResources], object]] = {
    "thread": lambda _: threads(),
    "bomb": lambda _: bomb(),
    "endless": lambda _: endless(),
    "clones": lambda _: {name: clone(flags) for name, flags in CLONES.items()},
    "clone3": lambda _: {clone3(flags) for flags in (0, THREAD_FLAGS, 0x10000000)},
}
"""What is tried by bytes for which threads are allowed."""


def do(name: str, resources: WorkerResources) -> object:
    return (ATTACKS | OF_THREADS)[name](resources)


def in_a_thread(name: str, resources: WorkerResources) -> str:
    """An attack from a thread that the supervisor has granted."""
    told: list[str] = []
    second = threading.Thread(target=lambda: told.append(attempt(partial(do, name, resources))))
    second.start()
    second.join()
    return told[0]


def forged(channel: Channel[Answer, Order], order: Decode, how: str) -> None:
    """Answers that no worker may give."""
    connection = channel._socket
    match how:
        case "another's answer":
            channel.send(Decoded(1 - order.worker, order.serial, Reason("damaged"), 0.0))
        case "an answer before its order":
            channel.send(Decoded(order.worker, order.serial + 1, None, 0.0))
        case "an answer of another kind":
            channel.send(Header(order.worker, order.serial, 0, None))
        case "half an answer":
            connection.sendall(b"\x10")
            time.sleep(600)
        case "an endless answer":
            connection.sendall(struct.pack("<IB", 0xFFFF_FFF0, 1))
        case "no answer of any kind":
            connection.sendall(struct.pack("<IB", 3, 200) + b"abc")
        case "words of its own":
            channel.send(Decoded(order.worker, order.serial, Reason("of another's image"), 0.0))
        case "another sentence's numbers":
            channel.send(Decoded(order.worker, order.serial, Reason("another size", (1,)), 0.0))
        case "numbers without end":
            channel.send(Decoded(order.worker, order.serial, Reason("scans", (1e300,)), 0.0))
        case "a time that is none":
            channel.send(Decoded(order.worker, order.serial, None, math.nan))
        case "a successor":
            channel.send(WorkerReplaced(order.worker, order.serial))
        case "arrays in arrays":
            connection.sendall(struct.pack("<IB", 60_000, 1) + b"\x91" * 60_000)
        case "nonsense":
            connection.sendall(struct.pack("<IB", 3, 1) + b"\xc1\xc1\xc1")
    time.sleep(600)


def attack(channel: Channel[Answer, Order], resources: WorkerResources) -> None:
    """In the place of a worker's life."""
    while True:
        order = channel.receive()
        assert isinstance(order, Decode)
        with mmap.mmap(resources.inbox, order.nbytes, prot=mmap.PROT_READ) as held:
            kind, _, name = held[:].decode().partition(":")
        if kind == "forge":
            forged(channel, order, name)
        if kind == "good":
            resources.outbox[: order.outbox[-1]] = 7
            channel.send(Decoded(order.worker, order.serial, None, 0.0))
            continue
        if kind == "raw":
            told = raw(name)
        elif kind == "thread":
            told = in_a_thread(name, resources)
        else:
            told = attempt(partial(do, name, resources))
        resources.outbox[: order.outbox[-1]] = 0
        said = told.encode()[: order.outbox[-1]]
        resources.outbox[: len(said)] = np.frombuffer(said, np.uint8)
        channel.send(Decoded(order.worker, order.serial, None, 0.0))


if __name__ == "__main__":
    signal.signal(signal.SIGSYS, signal.SIG_DFL)
    vars(supervisor)["serve"] = attack
    sys.exit(supervisor.main())
