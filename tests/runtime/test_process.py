"""How a worker's process takes plans and masks from its socket, where steps take their time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from saccade.core.metrics import Metrics
from saccade.core.plan import Masks, Plan, Row, StepResult
from saccade.ipc.child import Channel
from saccade.ipc.messages import WORKER_END, WORKERS_END, Finish, FromWorker, ToWorker
from saccade.runtime.begun_step import MaskSource
from saccade.runtime.process import carry_out

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
    run: Any = carry_out
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


NEEDLESS = ("numba", "llvmlite", "transformers", "sympy", "torch._dynamo", "torch._inductor")
IMPORTED = f"""
import json, sys
import saccade.runtime.process, saccade.kernels.x86.ops
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
