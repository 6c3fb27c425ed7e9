"""Servers started from a command line on a free port. A server is ready once it responds to
/v1/models.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from saccade.core.errors import ConfigError
from saccade.ipc.own_server import endings_raised, free_port
from saccade.ipc.tied import tied

STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Side:
    """A server of a comparison: its label, and its command line with {port}."""

    label: str
    command: str


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A running server. `pid` is the process that started all of its processes."""

    url: str
    pid: int


@contextmanager
def running(side: Side, logs: Path, start_timeout: float, port: int = 0) -> Iterator[StartedServer]:
    """Start a server, wait until it is ready, and stop it at the end.

    port: 0 to choose a free one.

    Raises ConfigError with the last lines of its output if it does not become ready.
    """
    port = port or free_port()
    path = logs / f"{side.label.replace(os.sep, '_')}-{port}.log"
    command = shlex.split(side.command.replace("{port}", str(port)))
    if "{port}" not in side.command:
        raise ConfigError(f"the command line of {side.label} has no {{port}}: {side.command}")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{side.label} does not start: {command[0]}: no such program")
    with endings_raised(), path.open("wb") as log:
        # In a separate session, Ctrl-C only reaches this program, which then stops the server.
        process = subprocess.Popen(
            tied(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process, side, path, start_timeout)
            yield StartedServer(url, process.pid)
        finally:
            stop(process)


def _await(
    url: str, process: subprocess.Popen[bytes], side: Side, log: Path, seconds: float
) -> None:
    end = time.monotonic() + seconds
    while not answers_models(url):
        if process.poll() is not None or time.monotonic() > end:
            why = (
                f"it ended with status {process.returncode}"
                if process.returncode is not None
                else f"no answer within {seconds:g} s"
            )
            last = log.read_text(errors="replace")[-1500:]
            raise ConfigError(f"{side.label} does not start: {why}. The end of its output:\n{last}")
        time.sleep(0.2)


def answers_models(url: str) -> bool:
    """Return True if the models are listed, and /health returns 200 or does not exist."""
    try:
        with httpx.Client(base_url=url, timeout=5) as client:
            return client.get("/v1/models").is_success and client.get("/health").status_code in (
                200,
                404,
            )
    except httpx.HTTPError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server, then kill any processes that it left behind."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(family, timeout=5)[1]:
        child.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants."""
    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
