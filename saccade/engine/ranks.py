"""The ranks beside the first: starts their processes, hands every plan to each, and ends the engine
when one of them fails.

A plan is encoded once and written to one socket pair per rank; nothing comes back but signs of
life. A thread watches the processes: whatever a step hangs in, the death or the silence of a rank
ends this process, which takes the other ranks with it. Knows nothing of what plans say.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Protocol

import msgspec

from saccade.core.arena import Arena
from saccade.core.config import EngineConfig, Hardware
from saccade.core.plan import Plan, StepResult
from saccade.parallel import PeerLost, leave
from saccade.runtime.rank import HEARTBEAT_SECONDS, PEER_LOST, Load, RankBoot, Report

SILENT_SECONDS = 5.0
"""A rank that has not been heard of for so long is stuck, or stopped."""
SETTLE_SECONDS = 0.2
"""After the first sign of trouble, time for the others: the one that failed first should be named,
not those that it took along.
"""
STOP_SECONDS = 5.0

_ENCODER = msgspec.msgpack.Encoder()
_REPORTS = msgspec.msgpack.Decoder(Report)


class Executor(Protocol):
    """The first rank, in this process."""

    def execute(self, plan: Plan) -> StepResult: ...


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    socket: Connection
    pidfd: int
    heard: float | None = None
    error: str | None = None

    def read(self) -> Hardware | None:
        """Take in what it has reported; returns what it has when it says that it has loaded."""
        loaded = None
        with suppress(EOFError, OSError):
            while self.socket.poll():
                report = _REPORTS.decode(self.socket.recv_bytes())
                self.error = report.error or self.error
                loaded = report.loaded or loaded
                # Its silence counts from its first heartbeat on: loading may take any time.
                self.heard = None if report.loaded else time.monotonic()
        return loaded

    @property
    def failure(self) -> tuple[int, str] | None:
        """(how sure this is the one that failed first: 0 is most, why)."""
        code = self.process.poll()
        if code is not None and code < 0:
            return (
                0,
                f"rank {self.number} (process {self.process.pid}) was killed by signal {-code}",
            )
        if self.error is not None:
            return 1, f"rank {self.number}: {self.error}"
        if code is not None:
            return 3 if code == PEER_LOST else 2, f"rank {self.number} ended with status {code}"
        if self.heard is not None and time.monotonic() - self.heard > SILENT_SECONDS:
            return (
                4,
                f"rank {self.number} (process {self.process.pid}) has not been heard of for "
                f"{SILENT_SECONDS:.0f} s",
            )
        return None


class Ranks:
    """Processes 1 to size - 1, from `load` of rank 0.

    `give_up(why)` must end this process; it is called from another thread.
    """

    def __init__(self, load: Load, arena: Arena, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._step_timeout = load.parallel.step_timeout
        self._step_began: float | None = None
        self._first: Executor | None = None
        self._loaded: queue.Queue[Hardware] = queue.Queue()
        self._closing = threading.Event()
        self._ranks = [
            _start(replace(load, rank=rank), arena) for rank in range(1, load.parallel.size)
        ]
        threading.Thread(target=self._watch, name="saccade-ranks", daemon=True).start()

    def wait_loaded(self) -> list[Hardware]:
        """Until every rank has loaded; what each has."""
        return [self._loaded.get() for _ in self._ranks]

    def begin(self, config: EngineConfig) -> None:
        """Every rank makes its memory.

        The first must do so now too: they may have sums to make together.
        """
        self._send(_ENCODER.encode(config))

    def follow(self, first: Executor) -> None:
        """From now on `execute` may be called. `first` is the rank of this process."""
        self._first = first

    def execute(self, plan: Plan) -> StepResult:
        """One step on every rank. Ends the process, or raises PeerLost, when a rank fails."""
        assert self._first is not None
        self._step_began = time.monotonic()
        try:
            self._send(_ENCODER.encode(plan))
            return self._first.execute(plan)
        except (PeerLost, OSError) as error:
            # The watch knows who and why, and is about to end this process.
            time.sleep(SILENT_SECONDS)
            raise PeerLost(f"lost touch with the other ranks: {error}") from error
        finally:
            self._step_began = None

    def close(self) -> None:
        """End the ranks in order, and whoever does not follow."""
        self._closing.set()
        with suppress(OSError):
            self._send(b"")
        leave()
        deadline = time.monotonic() + STOP_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            rank.socket.send_bytes(message)

    # ---- the watch, in its own thread

    def _watch(self) -> None:
        while not self._closing.is_set():
            wait(
                [source for rank in self._ranks for source in (rank.socket, rank.pidfd)],
                HEARTBEAT_SECONDS,
            )
            for rank in self._ranks:
                if (loaded := rank.read()) is not None:
                    self._loaded.put(loaded)
            if self._closing.is_set():
                return
            if (why := self._trouble()) is not None:
                for rank in self._ranks:
                    rank.process.kill()
                self._give_up(why)
                return

    def _trouble(self) -> str | None:
        began = self._step_began
        if began is not None and time.monotonic() - began > self._step_timeout:
            return (
                f"a step has taken longer than {self._step_timeout:g} s on {len(self._ranks) + 1} "
                "ranks (--step-timeout)"
            )
        if not any(rank.failure for rank in self._ranks):
            return None
        time.sleep(SETTLE_SECONDS)
        for rank in self._ranks:
            rank.read()
        failures = [failure for rank in self._ranks if (failure := rank.failure) is not None]
        return min(failures)[1] if failures else None


def _start(load: Load, arena: Arena) -> _Rank:
    ours, theirs = Pipe()
    boot = RankBoot(os.getpid(), load, theirs.fileno(), arena.fd, arena.size)
    inherited = (theirs.fileno(), arena.fd, load.group_fd)
    command = [sys.executable, "-m", "saccade.runtime.rank"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=True
    )
    theirs.close()
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died already: the watch will say so
        process.stdin.write(_ENCODER.encode(boot))
        process.stdin.close()
    return _Rank(load.rank, process, ours, os.pidfd_open(process.pid))
