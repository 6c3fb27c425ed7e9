"""A real `saccade serve` process on a free port, for tests and benchmarks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

START_SECONDS = 60
WAYS = ("direct", pytest.param("routed", marks=pytest.mark.slow))
"""How a server is asked."""


@dataclass(frozen=True)
class Server:
    """A running server. `url` is without /v1."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics; 0 while it has never been counted."""
        wanted = (
            "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
            if labels
            else ""
        )
        for line in httpx.get(f"{self.url}/metrics").raise_for_status().text.splitlines():
            if line.startswith(f"{name}{wanted} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        """Until a metric has a value: what the engine does after an answer is on its way may be
        counted a moment later.
        """
        deadline = time.monotonic() + 20
        while self.metric(name, **labels) != value:
            assert time.monotonic() < deadline, (
                f"{name} is {self.metric(name, **labels)}, not {value}"
            )
            time.sleep(0.02)


@dataclass(frozen=True)
class Routed(Server):
    """A server that is asked through a router: all but the address is the server's own."""

    behind: Server

    def metric(self, name: str, **labels: str) -> float:
        return self.behind.metric(name, **labels)


@contextmanager
def perhaps_routed(server: Server, way: str, folder: Path, *options: str) -> Iterator[Server]:
    """`server`, asked itself where `way` is "direct", else through a router."""
    if way == "direct":
        yield server
        return
    with routing([server], folder, *options) as router:
        yield Routed(router.url, server.process, server.log, server)


@contextmanager
def routing(
    workers: Sequence[Server], folder: Path, *options: str, status: int = 0
) -> Iterator[Server]:
    """`saccade route` over `workers`, as `serving`."""
    urls = (worker.url for worker in workers)
    with _running(folder, "route", *("--workers", *urls), *options, status=status) as router:
        yield router


@contextmanager
def serving(
    model: str | Path, folder: Path, *options: str, threads: int = 1, status: int = 0
) -> Iterator[Server]:
    """Serve `model`; `folder` takes the log. The server is stopped in order at the end, unless it
    has gone, and must exit with `status`.

    One engine thread unless told: tiny matrices gain nothing from more, and the machine is shared.
    """
    few = ("--media-workers", "1", "--threads", str(threads))
    with _running(folder, "serve", str(model), *few, *options, status=status) as server:
        yield server


@contextmanager
def _running(folder: Path, *words: str, status: int) -> Iterator[Server]:
    """A command of `saccade` that listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "saccade", *words, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == status, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health").is_success:
                return
        time.sleep(0.1)
    raise AssertionError("not ready: " + server.log.read_text())
