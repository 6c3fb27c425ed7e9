"""How often the processes of a server sleep and wake for a token. Beside a busy neighbour each
wake-up may wait for a turn, so their number bounds what a neighbour can cost.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from saccade_bench.fixtures.server import Server, serving

pytestmark = pytest.mark.more

TOKENS = 100
ENDLESS = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
PER_TOKEN = {"front": 0.25, "saccade.engine.main": 2, "saccade.runtime.process": 0.5}
"""Wake-ups that a token may cost a process: the engine's are for a result, and for what it sends.
The front end hears of 16 at once, as nobody reads along, and the model is told of 8 at once.
"""
PER_SECOND = 60
"""Wake-ups by clocks: signs of life, deadlines, uvicorn's ten looks a second."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("demo"), "--speculative", "off") as server:
        yield server


@contextmanager
def neighbour(*, busy: bool) -> Iterator[None]:
    """An endless loop on one of the server's cores, if `busy`."""
    if not busy:
        yield
        return
    endless = subprocess.Popen([sys.executable, "-c", ENDLESS])
    try:
        yield
    finally:
        endless.kill()
        endless.wait()


def wake_ups(server: Server) -> dict[str, int]:
    """Voluntary switches so far of the processes that a token goes through."""
    front = psutil.Process(server.process.pid)
    processes = {"front": front}
    for child in front.children(recursive=True):
        for word in child.cmdline():
            if word in PER_TOKEN:
                processes[word] = child
    assert processes.keys() == PER_TOKEN.keys()
    return {name: _switches(each.pid) for name, each in processes.items()}


def _switches(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside a busy neighbour"])
def test_a_token_wakes_each_process_a_few_times(server: Server, busy: bool) -> None:
    body = {"model": "demo", "prompt": "how many", "max_tokens": TOKENS, "ignore_eos": True}
    with neighbour(busy=busy):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        before = wake_ups(server)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        after = wake_ups(server)
    seconds = answer.raise_for_status().elapsed.total_seconds()
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    for name, most in PER_TOKEN.items():
        woken = after[name] - before[name]
        print(name, woken / TOKENS, seconds)
        assert woken <= most * TOKENS + PER_SECOND * seconds, name
