"""Manages all workers of an engine, one process per rank.

Plans are sent to all ranks, and rank 0 answers them. This module also detects when workers have
failed or hang, and describes why. Sending never waits for a worker. This module uses only the
amount of work in a plan.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from saccade.core.config import EngineConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import CancelSteps, Masks, Plan, StepResult
from saccade.ipc.child import AsyncChannel, Child, HeartbeatMonitor
from saccade.ipc.messages import (
    PEER_LOST_STATUS,
    WORKERS_END,
    Failed,
    Finish,
    FoundDevices,
    FromWorker,
    Heartbeat,
    Load,
    Loaded,
    Loading,
    MetricValues,
    Started,
    StartWorker,
    ToWorker,
)

SILENT_SECONDS = 5.0
"""Time without a heartbeat after which a worker counts as hanging."""
SETTLE_SECONDS = 0.2
"""Time to wait after the first sign of a failure, so that the error names the worker that failed
first, not one that failed as a consequence.
"""
FINISH_SECONDS = 5.0  # time for workers to exit, after which they are killed
OVERDUE_SECONDS = 4.0
"""A step is reported as overdue this long after its expected end."""
SLOWER = 4.0
"""A step is expected to take at most this many times as long, per token and patch, as the slowest
step so far.
"""

Answer = TypeVar("Answer")


class WorkersLost(Exception):
    """Raised when the workers have failed. The message names the worker that failed first, and
    why.
    """


class _Rank:
    def __init__(
        self, number: int, child: Child, channel: AsyncChannel[ToWorker, FromWorker], name: str
    ) -> None:
        self.number = number
        self.child = child
        self.channel = channel
        self.name = name
        self.error: str | None = None
        self.beats = False
        self.silence = HeartbeatMonitor()

    def take_messages(self, metrics: Metrics) -> list[FromWorker]:
        """Remove and return the worker's messages, except heartbeats, metrics and errors, which are
        recorded.
        """
        answers: list[FromWorker] = []
        for message in self.channel.take_messages():
            self.silence.heard()
            match message:
                case Heartbeat():
                    self.beats = True  # before the first heartbeat, loading may take any time
                case MetricValues(values):
                    metrics.absorb(values)
                case Failed(error):
                    self.error = error
                case _:
                    answers.append(message)
        return answers

    @property
    def silent(self) -> bool:
        return self.beats and self.silence.seconds > SILENT_SECONDS

    @property
    def in_trouble(self) -> bool:
        return self.channel.over or self.error is not None or self.silent

    def explain(self) -> tuple[int, str]:
        """Return (order, reason) of a failure. The worker with the lowest order most likely failed
        first.
        """
        status = self.child.status
        if status is not None and status < 0:
            return 0, f"{self.name} {self.child.ending}"
        if self.error is not None:
            return 1, f"rank {self.number}: {self.error}"
        if status is not None:
            return 3 if status == PEER_LOST_STATUS else 2, f"{self.name} {self.child.ending}"
        if self.channel.over:
            return 2, f"{self.name} has closed its connection"
        return 4, f"{self.name} sent no heartbeat for {SILENT_SECONDS:.0f} s"


@dataclass(slots=True)
class _Pace:
    """Tracks the slowest step so far, in seconds per token and per patch. It is 0 before the first
    step.
    """

    slowest: float = 0.0

    def note(self, plan: Plan, seconds: float) -> None:
        units = plan.num_tokens + plan.patches
        if units and plan.change is None:
            self.slowest = max(self.slowest, seconds / units)

    def allowed(self, plan: Plan) -> float | None:
        """Return the maximum expected time of the plan in seconds, or None if it cannot be
        estimated.
        """
        units = plan.num_tokens + plan.patches
        known = self.slowest and plan.change is None
        return SLOWER * self.slowest * units if known else None


class Workers:
    """Manages the worker processes, which `engine/main.py` has started.

    Call `start`, `find_devices`, `load` and `allocate` in this order. Then send plans with `send`,
    and receive their results with `take_answers`. `close` or `kill` stops the processes. The event
    `arrived` is set when there are messages to take, or when a worker has disconnected.
    """

    def __init__(
        self,
        begun: Sequence[Child],
        arrived: asyncio.Event,
        metrics: Metrics,
        on_progress: Callable[[Loading], None] = lambda _: None,
    ) -> None:
        """Use these processes, ordered by rank.

        on_progress: called with the progress of loading.
        """
        self.size = len(begun)
        self._children = begun
        self._on_progress = on_progress
        self._arrived = arrived
        self._metrics = metrics
        self._ranks: list[_Rank] = []
        self._step_timeout = float("inf")
        self._flight: deque[Plan] = deque()
        self._since = 0.0  # start time of the step that is being computed
        self._pace = _Pace()

    # ---- start and stop

    async def start(self) -> None:
        """Open a channel to every process."""
        for rank, child in enumerate(self._children):
            channel = await AsyncChannel.open(child.socket, WORKERS_END, self._arrived)
            who = f"rank {rank}" if self.size > 1 else "the worker"
            name = f"{who} (process {child.pid})"
            self._ranks.append(_Rank(rank, child, channel, name))

    async def find_devices(self) -> int:
        """Return how many CUDA devices every worker sees. Raises WorkersLost."""
        return min(found.cuda_devices for found in await self._answers(FoundDevices))

    async def load(self, load: Load) -> list[Loaded]:
        """Load a shard of the model on every rank. Return the responses of all ranks. Raises
        WorkersLost.
        """
        self._step_timeout = load.parallel.step_timeout
        self._broadcast(load)
        return await self._answers(Loaded)

    async def allocate(self, config: EngineConfig) -> Started:
        """Allocate the memory of every rank. Return the response of rank 0.

        It lists the cached data found on disk. Raises WorkersLost.
        """
        self._broadcast(StartWorker(config))
        return (await self._answers(Started))[0]

    async def close(self) -> None:
        """Let the processes exit in order, and kill those that do not exit in time."""
        self._broadcast(Finish())
        await asyncio.gather(*(rank.child.end(FINISH_SECONDS) for rank in self._ranks))

    async def kill(self) -> None:
        """Kill the processes. May be called after `close`."""
        await asyncio.gather(*(rank.child.end() for rank in self._ranks))

    # ---- steps

    def send(self, plan: Plan) -> None:
        """Send a plan to every rank. It runs after all earlier plans."""
        if not self._flight:
            self._since = time.monotonic()
        self._flight.append(plan)
        self._broadcast(plan)

    def send_masks(self, masks: Masks) -> None:
        """Send the masks for the oldest plan in flight to rank 0, which samples."""
        self._ranks[0].channel.send(masks)

    def halt(self) -> None:
        """Cancel all steps that the workers have not started."""
        self._broadcast(CancelSteps())

    @property
    def in_flight(self) -> int:
        """The number of plans that were sent but do not have all results yet."""
        return len(self._flight)

    def take_answers(self) -> list[tuple[Plan, StepResult]]:
        """Remove and return the results received so far, in order. Each step has one, with its
        plan.

        Raises AssertionError if a result does not belong to the oldest plan.
        """
        answered = []
        for answer in self._ranks[0].take_messages(self._metrics):
            plan = self._flight[0]
            assert isinstance(answer, StepResult)
            assert 0 <= answer.step - plan.step < plan.steps
            if answer.skipped or answer.step + 1 == plan.step + plan.steps:
                self._flight.popleft()
            now = time.monotonic()
            self._pace.note(plan, now - self._since)
            self._since = now
            answered.append((plan, answer))
        for rank in self._ranks[1:]:
            rank.take_messages(self._metrics)
        return answered

    # ---- failures

    def tick(self) -> None:
        """Update the time since each worker's last heartbeat. Call this every
        `child.HEARTBEAT_SECONDS`.
        """
        for rank in self._ranks:
            rank.silence.tick()

    @property
    def in_trouble(self) -> bool:
        """Return True if a worker has failed or hangs, or if a step has timed out."""
        return self._timed_out or any(rank.in_trouble for rank in self._ranks)

    async def explain(self) -> str:
        """Return which worker failed first, and why."""
        if not any(rank.in_trouble for rank in self._ranks):
            ranks = f" on {self.size} ranks" if self.size > 1 else ""
            limit = f"{self._step_timeout:g} s{ranks} (--tune step_timeout)"
            return f"a step has taken longer than {limit}"
        await asyncio.sleep(SETTLE_SECONDS)
        for rank in self._ranks:
            rank.take_messages(self._metrics)
        _, why = min(rank.explain() for rank in self._ranks if rank.in_trouble)
        return why.removeprefix("rank 0: ") if self.size == 1 else why

    @property
    def overdue(self) -> str:
        """The reason why the current step takes longer than expected, or "" if it does not."""
        if not self._flight:
            return ""
        plan, passed = self._flight[0], time.monotonic() - self._since
        allowed = self._pace.allowed(plan)
        if allowed is None or passed < allowed + OVERDUE_SECONDS:
            return ""
        return f"a step has run for {passed:.0f} s; it was expected to take at most {allowed:.1f} s"

    @property
    def _timed_out(self) -> bool:
        return bool(self._flight) and time.monotonic() - self._since > self._step_timeout

    def _broadcast(self, message: ToWorker) -> None:
        frame = WORKERS_END.encode(message)
        for rank in self._ranks:
            rank.channel.write(frame)

    async def _answers(self, kind: type[Answer]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        while len(answers) < self.size:
            self._arrived.clear()
            for rank in self._ranks:
                for answer in rank.take_messages(self._metrics):
                    if isinstance(answer, Loading):
                        self._on_progress(answer)
                        continue
                    assert isinstance(answer, kind)
                    answers[rank.number] = answer
            if self.in_trouble:
                raise WorkersLost(await self.explain())
            if len(answers) < self.size:
                await self._arrived.wait()
        return [answers[rank] for rank in range(self.size)]
