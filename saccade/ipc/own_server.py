"""A server that a command starts for itself: a process that ends with the command, whatever ends
that.

Four things end the command in order: a terminal that closes (SIGHUP), a supervisor (SIGTERM), a
reader of its output that leaves and a starter that dies. Where the command is killed, the kernel
kills the server.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import POLLIN, poll
from typing import IO, NoReturn

import httpx

from saccade.core.errors import StartupError
from saccade.ipc.tied import start_tied

SILENT_SECONDS = 120.0
"""A server that makes no progress for so long while it starts is given up."""
HEALTH_SECONDS = 5.0
GRACE_SECONDS = 60.0
"""A server gets so long to end in order before it is killed."""
ENDINGS = signal.SIGTERM, signal.SIGHUP
STDOUT = 1


@contextmanager
def own_server(
    *options: str, starter: int | None = None, output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `saccade serve OPTION...` within the context, which belongs to the main thread.

    The command ends with whoever reads what it prints, and with `starter`, another process.
    output: a file for what the server prints.
    """
    with endings_raised(), _watched(starter):
        # A session of its own: Ctrl-C comes here first, and the server is then stopped in order.
        words = ("serve", *options)
        server = start_tied("saccade", *words, start_new_session=True, stdout=output, stderr=output)
        try:
            yield server
        finally:
            _stop(server)


def wait_until_ready(
    address: str, server: subprocess.Popen[bytes], silent_seconds: float = SILENT_SECONDS
) -> None:
    """Poll /health as long as the server makes progress: it answers, or it computes.

    A server that answers watches its own processes, and ends if they stop. Raises StartupError when
    the server ends, or makes no progress for `silent_seconds`.
    """
    spent, deadline = 0, time.monotonic() + silent_seconds
    with httpx.Client(base_url=address, timeout=HEALTH_SECONDS) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise StartupError(
                    f"the server ended with status {server.returncode} before it was ready"
                )
            answer = None
            with suppress(httpx.TransportError):
                answer = client.get("/health")
            if answer is not None and answer.is_success:
                return
            before, spent = spent, _cpu_ticks(server.pid)
            if answer is not None or spent > before:
                deadline = time.monotonic() + silent_seconds
            time.sleep(0.1)
    raise StartupError(
        f"the server made no progress for {silent_seconds:.0f} seconds; its log has its last step. "
        "Run the same command again"
    )


def _cpu_ticks(pid: int) -> int:
    with suppress(OSError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(after_name[11]) + int(after_name[12])  # utime, stime
    return 0


def free_port(wanted: int = 0) -> int:
    """Return `wanted` if that port is free, else a port from the system."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise StartupError("no free port")


@contextmanager
def endings_raised() -> Iterator[None]:
    """Let signals that end a process end the context first, as exceptions in the main thread.

    Signals that are ignored (nohup) stay so.
    """
    before = {each: signal.getsignal(each) for each in ENDINGS}
    taken = [each for each in ENDINGS if before[each] != signal.SIG_IGN]
    for each in taken:
        signal.signal(each, _leave)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, before[each])


def _leave(number: int, _: object) -> NoReturn:
    _ignore_endings()
    raise SystemExit(128 + number)


def _ignore_endings() -> None:
    for each in ENDINGS:
        signal.signal(each, signal.SIG_IGN)


def _stop(server: subprocess.Popen[bytes]) -> None:
    _ignore_endings()
    try:
        if server.poll() is None:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(GRACE_SECONDS)
    finally:
        server.kill()
        server.wait()


@contextmanager
def _watched(starter: int | None) -> Iterator[None]:
    """End this process as SIGTERM does when `starter` or the reader of its output ends.

    Signals leave both unreported, so this watches them within the context.
    """
    over = os.eventfd(0)
    gone = [_opened(starter)] if starter is not None else []
    poller = poll()
    for each in (over, *gone):
        poller.register(each, POLLIN)
    if _is_read():
        poller.register(STDOUT, 0)  # errors and hang-ups are always reported

    def wait() -> None:
        if over not in (each for each, _ in poller.poll()):
            os.kill(os.getpid(), signal.SIGTERM)

    watch = threading.Thread(target=wait, daemon=True, name="saccade-watch")
    watch.start()
    try:
        yield
    finally:
        os.eventfd_write(over, 1)
        watch.join()
        for each in (over, *gone):
            os.close(each)


def _opened(starter: int) -> int:
    """Open a descriptor that reports the end of `starter`."""
    try:
        return os.pidfd_open(starter)
    except ProcessLookupError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _is_read() -> bool:
    """Return True if another process reads what this one prints, as it comes."""
    with suppress(OSError):
        kind = os.fstat(STDOUT).st_mode
        return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    return False
