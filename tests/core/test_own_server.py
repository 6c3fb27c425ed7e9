"""A command waits for the server that it started as long as that makes progress."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from saccade.core.errors import StartupError
from saccade.ipc.own_server import free_port, wait_until_ready

pytestmark = pytest.mark.more

SILENT_SECONDS = 2.0
"""Shorter than each of the starts below."""
SERVES = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < {starting} else 200)
        self.end_headers()
    def log_message(self, *_): pass
{before}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
COMPUTES = "end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
SLEEPS = "time.sleep(60)"


@contextmanager
def started(starting: int = 0, before: str = "") -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process whose /health is 503 for the first `starting` requests."""
    port = free_port()
    code = SERVES.format(starting=starting, before=before)
    process = subprocess.Popen([sys.executable, "-c", code, str(port)])
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_answers_is_waited_for() -> None:
    with started(starting=40) as (address, process):
        wait_until_ready(address, process, SILENT_SECONDS)


def test_a_server_that_computes_before_it_listens_is_waited_for() -> None:
    with started(before=COMPUTES) as (address, process):
        wait_until_ready(address, process, SILENT_SECONDS)


def test_a_server_that_does_neither_is_given_up_with_what_to_type() -> None:
    with (
        started(before=SLEEPS) as (address, process),
        pytest.raises(StartupError, match=r"no progress for 2 seconds; its log .* again"),
    ):
        wait_until_ready(address, process, SILENT_SECONDS)


def test_a_server_that_ended_is_not_waited_for() -> None:
    with (
        started(before="sys.exit(3)") as (address, process),
        pytest.raises(StartupError, match="exited with status 3"),
    ):
        wait_until_ready(address, process)
