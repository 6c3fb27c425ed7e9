"""How a worker's process takes plans and masks from its socket, where steps take their time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from saccade.core.metrics import Metrics
from saccade.core.plan import ADAPT, CancelSteps, Masks, Plan, Row, StepResult
from saccade.ipc.child import Channel
from saccade.ipc.messages import WORKER_END, WORKERS_END, Finish, FromWorker, ToWorker
from saccade.runtime.inflight_step import MaskSource
from saccade.runtime.process import execute_orders

MASKED = Row(0, 0, 1, (), sample=True, masked=True)


@dataclass
class Launched:
    """A step on a device that is never seen to be ready: whoever wants its result waits."""

    step: int

    def ready(self) -> bool:
        return False

    def result(self) -> StepResult:
        return StepResult(self.step)


@dataclass
class Device:
    """What a `Worker` on a GPU does with time, without a GPU."""

    log: list[Any] = field(default_factory=list)

    def begin_step(self, plan: Plan, masks: MaskSource) -> Launched:
        self.log.append(plan.step)
        if plan.rows:
            words = masks()
            self.log.append(None if words is None else words.tolist())
        return Launched(plan.step)


@pytest.fixture
def running() -> Iterator[tuple[Device, Channel[ToWorker, FromWorker], threading.Thread]]:
    ours, theirs = socket.socketpair()
    device, end = Device(), Channel[FromWorker, ToWorker](theirs, WORKER_END)
    run: Any = execute_orders
    thread = threading.Thread(target=run, args=(device, end, Metrics()))
    thread.start()
    engine = Channel[ToWorker, FromWorker](ours, WORKERS_END)
    yield device, engine, thread
    thread.join(10)
    engine.close()
    end.close()
    assert not thread.is_alive()


def test_masks_come_after_the_step_before_was_answered(running: Any) -> None:
    device, engine, _ = running
    engine.send(Plan(0))
    engine.send(Plan(1, rows=(MASKED, MASKED)))
    assert engine.receive() == StepResult(0), "its tokens decide the masks"
    words = np.array([[1, 2], [3, -1]], np.int32)
    engine.send(Masks.of(1, [row.tobytes() for row in words]))
    engine.send(Plan(2))
    assert engine.receive() == StepResult(1)
    engine.send(Finish())
    running[2].join(10)
    assert device.log == [0, 1, words.tolist(), 2]


def test_an_end_instead_of_masks_is_an_end(running: Any) -> None:
    device, engine, thread = running
    engine.send(Plan(0, rows=(MASKED,)))
    engine.send(Finish())
    thread.join(10)
    assert device.log == [0, None]


@dataclass
class Stepping:
    """A `Worker` whose steps with rows wait at a gate. log: (step, where its first row starts)."""

    log: list[tuple[int, int]] = field(default_factory=list)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def begin_step(self, plan: Plan, _: MaskSource) -> Stepped:
        if plan.rows and plan.steps:
            self.log.append((plan.step, plan.rows[0].start))
            self.begun.release()
            self.gate.acquire()
        return Stepped(plan)


@dataclass
class Stepped:
    plan: Plan

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(self.plan.step, skipped=not self.plan.steps)


@pytest.fixture
def stepping() -> Iterator[tuple[Stepping, Channel[ToWorker, FromWorker]]]:
    ours, theirs = socket.socketpair()
    device, end = Stepping(), Channel[FromWorker, ToWorker](theirs, WORKER_END)
    run: Any = execute_orders
    thread = threading.Thread(target=run, args=(device, end, Metrics()))
    thread.start()
    engine = Channel[ToWorker, FromWorker](ours, WORKERS_END)
    yield device, engine
    engine.send(Finish())
    thread.join(10)
    engine.close()
    end.close()
    assert not thread.is_alive()


SEVERAL = Plan(0, rows=(Row(0, 9, 1, (4,), sample=True),), steps=4)


def test_several_steps_are_answered_one_by_one(stepping: Any) -> None:
    device, engine = stepping
    device.gate.release(5)
    engine.send(SEVERAL)
    engine.send(Plan(4, rows=(Row(0, 13, 1, (), sample=True),)))
    assert [engine.receive() for _ in range(5)] == [StepResult(step) for step in range(5)]
    assert device.log == [(step, 9 + step) for step in range(5)]


def test_a_halt_ends_several_steps_after_the_one_being_computed(stepping: Any) -> None:
    device, engine = stepping
    engine.send(SEVERAL)
    device.begun.acquire()
    engine.send(Plan(4, change=ADAPT))
    engine.send(CancelSteps())
    device.gate.release()
    assert engine.receive() == StepResult(0)
    assert engine.receive() == StepResult(1, skipped=True)
    assert engine.receive() == StepResult(4), "what is no row of theirs is done"
    assert device.log == [(0, 9)]


def test_a_halt_that_comes_too_late_ends_nothing(stepping: Any) -> None:
    device, engine = stepping
    device.gate.release(8)
    engine.send(SEVERAL)
    assert [engine.receive() for _ in range(4)] == [StepResult(step) for step in range(4)]
    engine.send(CancelSteps())
    engine.send(replace(SEVERAL, step=4))
    assert [engine.receive() for _ in range(4)] == [StepResult(4 + step) for step in range(4)]


def test_a_halt_is_seen_before_the_first_of_several_steps(stepping: Any) -> None:
    device, engine = stepping
    engine.send(Plan(0, rows=SEVERAL.rows))
    device.begun.acquire()
    engine.send(replace(SEVERAL, step=1))
    engine.send(CancelSteps())
    device.gate.release()
    assert engine.receive() == StepResult(0)
    assert engine.receive() == StepResult(1, skipped=True)
    assert device.log == [(0, 9)]


def test_an_end_ends_several_steps(stepping: Any) -> None:
    device, engine = stepping
    engine.send(SEVERAL)
    device.begun.acquire()
    engine.send(Finish())
    device.gate.release()
    assert engine.receive() == StepResult(0)
    assert engine.receive() == StepResult(1, skipped=True)


NEEDLESS = ("numba", "llvmlite", "transformers", "sympy", "torch._dynamo", "torch._inductor")
IMPORTED = f"""
import json, sys
import saccade.runtime.process, saccade.plugins.cpu.ops
print(json.dumps([each for each in {NEEDLESS!r} if each in sys.modules]))
"""


@pytest.mark.more
def test_a_worker_imports_no_compiler_before_it_compiles() -> None:
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


BEGUN = """
import json, sys
import saccade.engine.main
late = "numpy", "uvloop", "saccade.engine.process", "saccade.ipc.messages", "saccade.core.plan"
print(json.dumps([each for each in late if each in sys.modules]))
"""


@pytest.mark.more
def test_an_engine_begins_its_workers_before_it_imports_what_it_needs_itself() -> None:
    command = [sys.executable, "-c", BEGUN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
