"""Rights that a process gives up before reading hostile bytes: everything but computing, and
talking to its supervisor.

An allow-list of system calls stands in a filter that the kernel keeps to the process's end. Any
other call fails with EPERM, as if forbidden by another rule, so that libraries fall back. (A
deny-list would have to know every call in later kernels.) No file, no socket, no process, no
executable memory. Threads begin only where told so, and then as many as `thread_gate.py` lets
begin. Only the descriptors in `keep` stay. Memory, files and processes have hard limits. All root's
rights go. Knows nothing of images.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 1 << 2
"""The flag leaves the processor's guesses as they are: before Linux 5.16 a filter slowed down all
of a process for the sake of secrets, of which this one has none.
"""
CAPABILITY_VERSION_3 = 0x20080522

LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL, ALLOW, REFUSE, ABSENT = 0x8000_0000, 0x7FFF_0000, 0x0005_0001, 0x0005_0026
"""REFUSE: fail with errno 1, EPERM; ABSENT: with 38, ENOSYS."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Places in what the kernel shows a filter. An argument has 8 bytes, the lower half first."""
X32 = 0x4000_0000
"""Calls by another table of numbers."""

MOST_DESCRIPTORS = 32
"""One more than the highest descriptor."""
MAPPED_EXECUTABLE = 4
"""PROT_EXEC"""
PLAIN_CONTROLS = (1, 2, 3, 1030)
"""Of fcntl: F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC."""

X86_64 = {
    "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "munmap": 11, "brk": 12, "rt_sigaction": 13,
    "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "nanosleep": 35, "getitimer": 36, "setitimer": 38, "getpid": 39, "sendto": 44,
    "recvfrom": 45, "exit": 60, "gettimeofday": 96, "getrusage": 98, "sigaltstack": 131,
    "gettid": 186, "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "ppoll": 271, "getrandom": 318, "mmap": 9, "mprotect": 10, "fcntl": 72, "prlimit64": 302,
}  # fmt: skip
AARCH64 = {
    "close": 57, "fstat": 80, "lseek": 62, "munmap": 215, "brk": 214, "rt_sigaction": 134,
    "rt_sigprocmask": 135, "rt_sigreturn": 139, "pread64": 67, "sched_yield": 124, "mremap": 216,
    "madvise": 233, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "getpid": 172,
    "sendto": 206, "recvfrom": 207, "exit": 93, "gettimeofday": 169, "getrusage": 165,
    "sigaltstack": 132, "gettid": 178, "futex": 98, "sched_getaffinity": 123,
    "restart_syscall": 128, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
    "exit_group": 94, "ppoll": 73, "getrandom": 278, "mmap": 222, "mprotect": 226, "fcntl": 25,
    "prlimit64": 261,
}  # fmt: skip

X86_64_THREADS = {"clone": 56, "clone3": 435, "rseq": 334, "set_robust_list": 273}
AARCH64_THREADS = {"clone": 220, "clone3": 435, "rseq": 293, "set_robust_list": 99}


class CallNumbers(NamedTuple):
    """A machine's name in the kernel, and its call numbers. They are for seccomp and capset, for
    allowed calls, and for calls that begin a thread. glibc ends the process where `rseq` is
    refused.
    """

    name: int
    seccomp: int
    capset: int
    calls: dict[str, int]
    threads: dict[str, int]


MACHINES = {
    "x86_64": CallNumbers(0xC000_003E, 317, 126, X86_64, X86_64_THREADS),
    "aarch64": CallNumbers(0xC000_00B7, 277, 91, AARCH64, AARCH64_THREADS),
}
THREAD_FLAGS = (0x003D_0F00, 0x007D_0F00)
"""What glibc and musl ask `clone` for when a thread begins: all is shared with the process, and no
process, namespace or tracing comes of it. `clone3` says the same in memory, which no filter can
see: where it is absent, both take `clone`.
"""

Step = tuple[int, int, int, int]
"""An instruction: code, instructions to skip if true, if false, operand."""


def confine(keep: Collection[int], memory: int, threads: bool = False) -> list[str]:
    """Give up all rights named above, in this process of one thread.

    `keep` are the descriptors to stay open. `memory` is the bytes that the address space may ever
    grow by. `threads` lets some begin, bounded elsewhere. Returns the rights that the kernel
    refuses to take, in words.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    close_all_but(keep)
    steps: dict[str, Callable[[], None]] = {
        "hard limits": lambda: _limit(memory, threads),
        "non-dumpable": lambda: _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)),
        "dropped capabilities": lambda: _drop_capabilities(libc),
        "no_new_privs": lambda: never_more_rights(libc),
        "a seccomp filter": lambda: _filter(libc, program(threads)),
    }
    missing = []
    for name, step in steps.items():
        try:
            step()
        except (OSError, ValueError) as error:
            missing.append(f"{name} ({error})")
    return missing


def close_all_but(keep: Collection[int]) -> None:
    """Close descriptors. Standard input, output and errors lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - of numbers
    except OSError:
        opened = [*range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    for number in opened:
        if number > 2 and number not in keep:
            with suppress(OSError):  # the list's own
                os.close(number)


def address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(memory: int, threads: bool) -> None:
    limits = {
        resource.RLIMIT_AS: address_space() + memory,
        resource.RLIMIT_NOFILE: MOST_DESCRIPTORS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if not threads:  # which count as processes do, for all that this user runs
        limits[resource.RLIMIT_NPROC] = 0
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up root's rights, among them to raise hard limits. Raises OSError."""
    head = struct.pack("<Ii", CAPABILITY_VERSION_3, 0)
    _check(libc.syscall(machine().capset, head, bytes(24)))


def never_more_rights(libc: ctypes.CDLL) -> None:
    """Keep executed files from adding rights, which is a condition for any filter.

    Raises OSError.
    """
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _filter(libc: ctypes.CDLL, steps: list[Step]) -> None:
    """Install the filter, also on an older kernel. Raises OSError."""
    try:
        install(libc, steps, SECCOMP_FILTER_FLAG_SPEC_ALLOW)
    except OSError:  # an older kernel
        install(libc, steps, 0)


def install(libc: ctypes.CDLL, steps: list[Step], flags: int) -> int:
    """Install a filter for this process and its children, on top of earlier filters. Returns the
    kernel's answer.

    Raises OSError.
    """
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    status: int = libc.syscall(machine().seccomp, SECCOMP_SET_MODE_FILTER, flags, program)
    _check(min(status, 0))
    return status


def program(threads: bool) -> list[Step]:
    """Build the filter for this machine. Raises OSError for an unknown machine."""
    here = machine()
    numbers = here.calls | (here.threads if threads else {})
    ruled: dict[str, list[Step]] = {
        "mmap": _none_of(2, MAPPED_EXECUTABLE),
        "mprotect": _none_of(2, MAPPED_EXECUTABLE),
        "prlimit64": _one_of(0, 0),  # its own
        "fcntl": _one_of(1, *PLAIN_CONTROLS),
        "clone": _one_of(0, *THREAD_FLAGS),
        "clone3": [(RETURN, 0, 0, ABSENT)],
    }
    code: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, here.name),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for call, number in numbers.items():
        verdict = ruled.get(call, [(RETURN, 0, 0, ALLOW)])
        code += [(JUMP_IF_EQUAL, 0, len(verdict), number), *verdict]
    return [*code, (RETURN, 0, 0, REFUSE)]


def _one_of(argument: int, *values: int) -> list[Step]:
    """Allow where an argument's lower half is one of `values`. These calls read only the lower
    half.
    """
    checks: list[Step] = [
        (JUMP_IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)
    ]
    return [_load(argument), *checks, (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]


def _none_of(argument: int, bits: int) -> list[Step]:
    """Allow where every one of `bits` is clear in an argument."""
    refused: list[Step] = [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    return [_load(argument), (JUMP_IF_ANY, 0, 1, bits), *refused]


def _load(argument: int) -> Step:
    return LOAD, 0, 0, ARGUMENTS + 8 * argument


def machine() -> CallNumbers:
    """Return this machine's numbers. Raises OSError for an unknown one."""
    found = MACHINES.get(platform.machine())
    if found is None:
        raise OSError(f"the numbers of system calls on {platform.machine()} are not known")
    return found


def _check(status: int) -> None:
    """Raise OSError if a call has failed."""
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
