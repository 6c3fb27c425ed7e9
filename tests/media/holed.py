"""Image workers with a hole, for `test_tenants.py`: whatever they read, Python between two marks in
an order's bytes is executed, as a decoder's hole would have it.

Started as `python -m tests.media.holed` in the place of `saccade.media.workers.supervisor`; with
arguments it is `saccade` itself, whose image workers have the hole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from saccade.media.workers import fork_server, supervisor, worker
from saccade.media.workers.orders import ReadHeaders
from saccade.media.workers.worker import WorkerResources

BEGIN, END = b"<<hole ", b" hole>>"
READERS = "decode", "read_header", "read_piece"

SPY = """
import os
kept = []

def spying(read):
    def run(order, *rest):
        kept.append(os.pread(rest[-1].inbox, 1 << 22, 0))
        return read(order, *rest)
    return run

for name in READERS:
    setattr(worker, name, spying(getattr(worker, name)))
"""
"""Keeps the bytes of all later orders."""
TELL = """
import os

def told(order, *rest):
    room = order.outbox[-1]
    found = b"".join(globals().get("kept", ())) + os.pread(resources.inbox, 1 << 22, 0)
    found = (found + bytes(resources.outbox[:room]))[:room]
    resources.outbox[:room] = 0
    resources.outbox[:len(found)] = np.frombuffer(found, np.uint8)

if hasattr(order, "targets"):
    once = told
"""
"""Answers with what was kept, and with what its memory holds, as its pixels."""
BLACKEN = """
def blackening(read):
    def run(order, *rest):
        found = read(order, *rest)
        resources.outbox[:order.outbox[-1]] = 7
        return found
    return run

for name in ("decode", "read_piece"):
    setattr(worker, name, blackening(getattr(worker, name)))
"""
"""Paints over all later orders."""
LIE = """
from saccade.media.content import Probe
from saccade.media.workers.orders import (Header)

def lying(order, place, resources):
    found = Probe("PNG", 33, 77, "RGB", 1, 1)
    if order.videos:
        found = Probe("VIDEO", 33, 77, "x", 1, 5, 9.0)
    return Header(order.worker, order.serial, place, found)

worker.read_header = lying
"""
"""Says of all later images that they are others."""
STAY = """
import os
from saccade.media.workers.orders import (Decoded)

decodes = hasattr(order, "targets")
if decodes:
    channel.send(Decoded(order.worker, order.serial, None, 1.0))
first = os.pread(resources.inbox, 1 << 16, 0)
while decodes:
    resources.outbox[:64] = 7
    later = os.pread(resources.inbox, 1 << 16, 0)
    if later != first:
        resources.outbox[:order.outbox[-1]] = 7
"""
"""Answers, and goes on."""
SLEEP = """
import time

while True:
    time.sleep(1)
"""
"""Takes no processor time, and never ends."""
SPIN = """
import signal

signal.setitimer(signal.ITIMER_PROF, 0)
signal.signal(signal.SIGPROF, signal.SIG_IGN)
while True:
    pass
"""
"""Stops its own clock, and takes processor time for ever."""
THREAD = """
import threading

def paint():
    while True:
        try:
            resources.outbox[:64] = 7
        except Exception:
            pass

if hasattr(order, "targets"):
    threading.Thread(target=paint, daemon=True).start()
"""
"""Leaves a thread behind, where one may begin."""


def with_code(data: bytes, *code: str) -> bytes:
    """Bytes that are read as ever, and execute code."""
    return data + b"".join(BEGIN + each.encode() + END for each in code)


def execute(read: Callable[..., Any], scope: dict[str, Any]) -> Callable[..., Any]:
    def run(order: Any, *rest: Any) -> Any:
        resources: WorkerResources = rest[-1]
        start, nbytes = 0, 0
        if isinstance(order, ReadHeaders):
            start, nbytes = order.places[rest[0]]
        else:
            nbytes = order.nbytes
        _, *parts = os.pread(resources.inbox, nbytes, start).split(BEGIN)
        scope.update(order=order, resources=resources, once=None)
        for part in parts:
            exec(part.partition(END)[0].decode(), scope)
        return (scope["once"] or read)(order, *rest)

    return run


def main() -> int:
    """As the supervisor's; `serve` is told of the channel, for code that answers by itself."""
    serve = worker.serve

    def serving(channel: Any, resources: WorkerResources) -> None:
        scope = {"worker": worker, "channel": channel, "np": np, "READERS": READERS}
        for name in READERS:
            setattr(worker, name, execute(getattr(worker, name), scope))
        serve(channel, resources)

    vars(supervisor)["serve"] = serving
    return supervisor.main()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "serve":
        from saccade.__main__ import main as serve_command

        vars(fork_server)["SUPERVISOR"] = "tests.media.holed"
        serve_command()
    sys.exit(main())
