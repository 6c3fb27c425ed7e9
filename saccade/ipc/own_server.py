"""Runs a server process for a command that needs one. The server never outlives the command.

Each of four events stops the command and its server cleanly: the terminal closes (SIGHUP), a
supervisor sends a stop signal (SIGTERM), the reader of the command's output exits, or the process
that started the command (`starter`) exits. If the command is killed, the kernel kills the server.
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
"""How long the server may make no progress during start-up before the command gives up."""
HEALTH_SECONDS = 5.0
GRACE_SECONDS = 60.0
"""How long a graceful shutdown may take before the server is killed."""
ENDINGS = signal.SIGTERM, signal.SIGHUP
STDOUT = 1


@contextmanager
def own_server(
    *options: str, starter: int | None = None, output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `saccade serve OPTION...` within the context, which must be entered in the main thread.

    starter: a pid. The command also stops when that process exits.
    output: a file for the server's output.
    """
    with endings_raised(), _exit_with(starter):
        # In a new session, Ctrl-C reaches this process only, which then stops the server in order.
        words = ("serve", *options)
        server = start_tied("saccade", *words, start_new_session=True, stdout=output, stderr=output)
        try:
            yield server
        finally:
            _stop(server)


def wait_until_ready(
    address: str, server: subprocess.Popen[bytes], silent_seconds: float = SILENT_SECONDS
) -> None:
    """Poll /health until the server is ready.

    Raises StartupError if the server exits, or if it neither responds nor uses CPU time for
    `silent_seconds`. A server that responds monitors its own processes, and exits if they hang.
    """
    spent, deadline = 0, time.monotonic() + silent_seconds
    with httpx.Client(base_url=address, timeout=HEALTH_SECONDS) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise StartupError(
                    f"the server exited with status {server.returncode} before it was ready"
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
    """Return `wanted` if that port is free, otherwise a free port chosen by the system.

    Raises StartupError if no port is free.
    """
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise StartupError("no free port was found for the server")


@contextmanager
def endings_raised() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to SystemExit in the main thread, so that cleanup code runs.

    A signal that was ignored before (nohup) is still ignored.
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
def _exit_with(starter: int | None) -> Iterator[None]:
    """Send SIGTERM to this process when the process `starter`, or the reader of this process's
    output, exits.

    No signal reports these events, so a thread polls for them within the context.
    """
    over = os.eventfd(0)
    gone = [_open_pidfd(starter)] if starter is not None else []
    poller = poll()
    for each in (over, *gone):
        poller.register(each, POLLIN)
    if _stdout_has_reader():
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


def _open_pidfd(starter: int) -> int:
    """Return a pidfd that becomes readable when the process `starter` exits. Raises SystemExit if
    it already has.
    """
    try:
        return os.pidfd_open(starter)
    except ProcessLookupError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _stdout_has_reader() -> bool:
    """Return True if stdout is a pipe or a socket, which another process reads."""
    with suppress(OSError):
        kind = os.fstat(STDOUT).st_mode
        return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    return False
