"""Image workers that are killed, or fail, or are slow while they start."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType

import psutil
import pytest

from saccade.core.arena import Arena
from saccade.core.config import MIB
from saccade.core.metrics import Metrics
from saccade.media.reasons import READS_HEIC
from saccade.media.workers import fork_server
from saccade.media.workers.fork_server import ForkServer
from saccade.media.workers.worker_slots import WorkerSlots
from tests.helpers.until import until
from tests.media import held_start, late_gate


@asynccontextmanager
async def started(module: ModuleType, arena: Arena | None = None) -> AsyncIterator[WorkerSlots]:
    """Slots of one worker, whose fork server runs `module`. The caller closes the slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "SUPERVISOR", module.__name__)
        server = ForkServer(decodes=False)
        server.start()
    failures: list[str] = []
    slots = WorkerSlots(server, arena, 1, 64 * MIB, Metrics(), lambda: None, failures.append)
    slots.start()
    try:
        yield slots
    finally:
        await asyncio.to_thread(server.close)
    assert not failures


def named(name: str) -> list[psutil.Process]:
    """The running descendants of this process with a name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def new_worker(*earlier: psutil.Process) -> psutil.Process:
    await until(lambda: any(each not in earlier for each in named("saccade-header")))
    return next(each for each in named("saccade-header") if each not in earlier)


@pytest.mark.more
async def test_a_worker_killed_while_it_starts_is_replaced() -> None:
    others = named("saccade-header")
    async with started(held_start) as slots:
        killed = await new_worker(*others)
        killed.kill()
        (await new_worker(*others, killed)).send_signal(signal.SIGUSR2)
        await until(lambda: slots.idle() is not None)
        await slots.close()


@pytest.mark.more
async def test_a_start_that_fails_as_the_pool_closes_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    others = named("saccade-header")
    async with started(held_start) as slots:
        worker = await new_worker(*others)
        supervisor = worker.parent()
        assert supervisor is not None
        supervisor.suspend()
        worker.send_signal(signal.SIGUSR1)
        await until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
        await slots.close()
        supervisor.resume()
        await until(lambda: not supervisor.is_running())
    assert capfd.readouterr().err == ""


@pytest.mark.more
@pytest.mark.skipif(not READS_HEIC, reason="no worker sends a gate for its threads")
async def test_a_worker_whose_first_message_is_late_is_used() -> None:
    arena = Arena.create(1 * MIB)
    async with started(late_gate, arena) as slots:
        await until(lambda: slots.idle() is not None)
        await slots.close()
    arena.close()
