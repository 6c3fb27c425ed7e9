"""A command in a terminal of its own: what it shows, what is typed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from select import select
from typing import Self

import psutil

SECONDS = 60.0
"""What a loaded machine may take."""
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
CTRL_C = "\x03"


class Terminal:
    """A context manager; whatever still runs at its end is killed."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._end, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=cwd,
            start_new_session=True, preexec_fn=lambda: _own(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._from = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in [*self.family(), self.process]:
            process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Close the terminal, as its window's end does."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def family(self) -> list[psutil.Process]:
        """The processes that the command has begun, and theirs."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C for a command that waits for its user. Python's readline has a moment between a
        prompt, or the echo of a key, and its wait for the next: a signal in there is missed.
        """
        command = psutil.Process(self.process.pid)
        deadline = time.monotonic() + SECONDS
        rested, before = 0, command.cpu_times()
        while rested < 4:
            assert time.monotonic() < deadline, f"it never rests: {self.shown}"
            time.sleep(0.05)
            now = command.cpu_times()
            rests = command.status() == psutil.STATUS_SLEEPING and now == before
            rested, before = rested + 1 if rests else 0, now
        self.type(CTRL_C)

    def until(self, words: str) -> str:
        """What was shown since the last call, up to and with `words`."""
        deadline = time.monotonic() + SECONDS
        while (at := self.shown.find(words, self._from)) < 0:
            assert time.monotonic() < deadline, f"no {words!r} in: {self.shown}"
            assert self._read(), f"it ended without {words!r}: {self.shown}"
        told = self.shown[self._from : at + len(words)]
        self._from = at + len(words)
        return told

    def ended(self) -> int:
        """Its exit status, once all that it shows was read."""
        deadline = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < deadline, f"it goes on: {self.shown}"
        return self.process.wait(SECONDS)

    def _read(self) -> bool:
        """What is there, after a moment; False once nobody holds the other end."""
        if not select([self._end], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self._end, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.shown += COLOURS.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
        return bool(data)


def _own(terminal: int) -> None:
    """In the child: the terminal is its own, so that Ctrl-C and a hang-up reach it."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has tests begin without


def gone(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that still run after a while: none, if all is well."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
