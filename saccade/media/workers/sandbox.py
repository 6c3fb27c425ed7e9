"""Sandboxes a process that reads untrusted bytes, so that it can only compute and exchange messages
with its supervisor.

A seccomp filter allows a list of system calls until the process exits. Other calls fail with EPERM,
so that libraries fall back. (A deny-list would have to include every call of later kernels.) The
process can open no files or sockets, start no processes and map no executable memory. It can start
threads only if enabled, and only as many as `thread_gate.py` allows. Only the descriptors in `keep`
stay open. Memory, files and processes have hard limits. Root's capabilities are dropped.
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
"""The flag keeps speculative execution enabled. Before Linux 5.16, a filter disabled it to protect
secrets. This process has none.
"""
CAPABILITY_VERSION_3 = 0x20080522

BPF_LD_ABS, BPF_JEQ, BPF_JGE, BPF_JSET, BPF_RET = 0x20, 0x15, 0x35, 0x45, 0x06
SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW, RET_EPERM, RET_ENOSYS = (
    0x8000_0000,
    0x7FFF_0000,
    0x0005_0001,
    0x0005_0026,
)
"""The last two are SECCOMP_RET_ERRNO with EPERM and with ENOSYS."""
NR_OFFSET, ARCH_OFFSET, ARGS_OFFSET = 0, 4, 16
"""Offsets in `struct seccomp_data`. An argument has 8 bytes, little-endian."""
X32_SYSCALL_BIT = 0x4000_0000
"""Set in the numbers of x32 system calls."""

MAX_DESCRIPTORS = 32
"""The limit of RLIMIT_NOFILE: all file descriptors must be below it."""
PROT_EXEC = 4
ALLOWED_FCNTL_COMMANDS = (1, 2, 3, 1030)
"""F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC."""

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


class SyscallTable(NamedTuple):
    """The audit constant of an architecture, and its system call numbers.

    glibc aborts if `rseq` fails, so it is among the calls that start threads.
    """

    name: int  # AUDIT_ARCH_*
    seccomp: int
    capset: int
    calls: dict[str, int]  # always allowed
    threads: dict[str, int]  # allowed if the process may start threads


SYSCALL_TABLES = {
    "x86_64": SyscallTable(0xC000_003E, 317, 126, X86_64, X86_64_THREADS),
    "aarch64": SyscallTable(0xC000_00B7, 277, 91, AARCH64, AARCH64_THREADS),
}
THREAD_FLAGS = (0x003D_0F00, 0x007D_0F00)
"""The `clone` flags that glibc and musl use to start a thread, without a new process, namespace or
tracing. `clone3` takes its flags in memory, which filters cannot read. If it fails with ENOSYS,
both fall back to `clone`.
"""

Instruction = tuple[int, int, int, int]
"""A BPF instruction: code, jump if true, jump if false, operand."""


def confine(keep: Collection[int], memory: int, threads: bool = False) -> list[str]:
    """Confine this single-threaded process.

    Returns descriptions of the restrictions that could not be applied.

    keep: file descriptors that stay open.
    memory: the number of bytes by which the address space may grow.
    threads: True to allow threads, whose number `thread_gate.py` limits.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    close_all_but(keep)
    steps: dict[str, Callable[[], None]] = {
        "hard limits": lambda: _limit(memory, threads),
        "non-dumpable": lambda: _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)),
        "dropped capabilities": lambda: _drop_capabilities(libc),
        "no_new_privs": lambda: set_no_new_privs(libc),
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
    """Close all file descriptors except `keep`, and redirect standard streams to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - of numbers
    except OSError:
        opened = [*range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    for number in opened:
        if number > 2 and number not in keep:
            with suppress(OSError):  # the descriptor of listdir itself
                os.close(number)


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(memory: int, threads: bool) -> None:
    limits = {
        resource.RLIMIT_AS: address_space() + memory,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if not threads:  # RLIMIT_NPROC counts threads, of all processes of the user
        limits[resource.RLIMIT_NPROC] = 0
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities, including the one to raise hard limits. Raises OSError."""
    head = struct.pack("<Ii", CAPABILITY_VERSION_3, 0)
    _check(libc.syscall(syscall_table().capset, head, bytes(24)))


def set_no_new_privs(libc: ctypes.CDLL) -> None:
    """Set no_new_privs, which seccomp requires of unprivileged processes. Raises OSError."""
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _filter(libc: ctypes.CDLL, steps: list[Instruction]) -> None:
    try:
        install(libc, steps, SECCOMP_FILTER_FLAG_SPEC_ALLOW)
    except OSError:  # an older kernel, which does not support the flag
        install(libc, steps, 0)


def install(libc: ctypes.CDLL, steps: list[Instruction], flags: int) -> int:
    """Install a seccomp filter for this process and its children, in addition to earlier ones.

    Returns the result of the system call. Raises OSError.
    """
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    status: int = libc.syscall(syscall_table().seccomp, SECCOMP_SET_MODE_FILTER, flags, program)
    _check(min(status, 0))
    return status


def program(threads: bool) -> list[Instruction]:
    """Return the instructions of the seccomp filter. Raises OSError on an unsupported
    architecture.
    """
    table = syscall_table()
    numbers = table.calls | (table.threads if threads else {})
    ruled: dict[str, list[Instruction]] = {
        "mmap": _none_of(2, PROT_EXEC),
        "mprotect": _none_of(2, PROT_EXEC),
        "prlimit64": _one_of(0, 0),  # of this process only
        "fcntl": _one_of(1, *ALLOWED_FCNTL_COMMANDS),
        "clone": _one_of(0, *THREAD_FLAGS),
        "clone3": [(BPF_RET, 0, 0, RET_ENOSYS)],
    }
    code: list[Instruction] = [
        (BPF_LD_ABS, 0, 0, ARCH_OFFSET),
        (BPF_JEQ, 1, 0, table.name),
        (BPF_RET, 0, 0, SECCOMP_RET_KILL_PROCESS),
        (BPF_LD_ABS, 0, 0, NR_OFFSET),
        (BPF_JGE, 0, 1, X32_SYSCALL_BIT),
        (BPF_RET, 0, 0, SECCOMP_RET_KILL_PROCESS),
    ]
    for call, number in numbers.items():
        verdict = ruled.get(call, [(BPF_RET, 0, 0, SECCOMP_RET_ALLOW)])
        code += [(BPF_JEQ, 0, len(verdict), number), *verdict]
    return [*code, (BPF_RET, 0, 0, RET_EPERM)]


def _one_of(argument: int, *values: int) -> list[Instruction]:
    """Return instructions that allow a call if the lower 32 bits of an argument are one of
    `values`.

    The kernel ignores the upper bits of these arguments.
    """
    checks: list[Instruction] = [
        (BPF_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)
    ]
    return [
        _load(argument),
        *checks,
        (BPF_RET, 0, 0, RET_EPERM),
        (BPF_RET, 0, 0, SECCOMP_RET_ALLOW),
    ]


def _none_of(argument: int, bits: int) -> list[Instruction]:
    """Return instructions that allow a call if none of `bits` is set in an argument."""
    refused: list[Instruction] = [(BPF_RET, 0, 0, RET_EPERM), (BPF_RET, 0, 0, SECCOMP_RET_ALLOW)]
    return [_load(argument), (BPF_JSET, 0, 1, bits), *refused]


def _load(argument: int) -> Instruction:
    return BPF_LD_ABS, 0, 0, ARGS_OFFSET + 8 * argument


def syscall_table() -> SyscallTable:
    """Return the system calls of this machine. Raises OSError on an unsupported architecture."""
    table = SYSCALL_TABLES.get(platform.machine())
    if table is None:
        raise OSError(f"system calls on {platform.machine()} are not supported")
    return table


def _check(status: int) -> None:
    """Raise OSError with libc's errno if `status` is not 0."""
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
