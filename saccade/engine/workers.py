"""All workers, for the engine: one process per rank, all started in the same way.

Sends every plan to all, takes the answers of rank 0, and reports when and why the workers cannot go
on. Sending never waits for a worker. Owns the processes and their known state. Of plans it
only knows the amount of work.
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
"""A worker that has not been heard of for so long is stuck, or stopped."""
SETTLE_SECONDS = 0.2
"""After the first sign of trouble, time for the others: the one that failed first should be named,
not those that it took along.
"""
FINISH_SECONDS = 5.0
OVERDUE_SECONDS = 4.0
"""A step is overdue so long after it should have ended."""
SLOWER = 4.0
"""A step may take so many times as long per token and patch as the slowest so far."""

Answer = TypeVar("Answer")


class WorkersLost(Exception):
    """The workers must give up. The message names the first to fail, and how."""


class _Rank:
    """One worker: its process, and its messages."""

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
        """Take the worker's messages.

        Signs of life, figures and the reason for its end are recorded instead.
        """
        answers: list[FromWorker] = []
        for message in self.channel.take_messages():
            self.silence.heard()
            match message:
                case Heartbeat():
                    self.beats = True  # before, loading may take any time
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
        """Return (certainty that this worker failed first, 0 the highest; the reason)."""
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
    """How fast steps are: seconds per token and patch, the slowest so far; 0 before the first."""

    slowest: float = 0.0

    def note(self, plan: Plan, seconds: float) -> None:
        units = plan.num_tokens + plan.patches
        if units and plan.change is None:
            self.slowest = max(self.slowest, seconds / units)

    def allowed(self, plan: Plan) -> float | None:
        """Return the most seconds for the plan, or None if the pace of such plans is unknown."""
        units = plan.num_tokens + plan.patches
        known = self.slowest and plan.change is None
        return SLOWER * self.slowest * units if known else None


class Workers:
    """A group of processes, which `engine/main.py` has begun. `start`, `find_devices`, `load`,
    `allocate`, then `send` and `take_answers`.

    `close` or `kill` ends them.

    `arrived` is set whenever there is something to take, or trouble to see.
    """

    def __init__(
        self,
        begun: Sequence[Child],
        arrived: asyncio.Event,
        metrics: Metrics,
        on_progress: Callable[[Loading], None] = lambda _: None,
    ) -> None:
        """Take the processes, by rank. `on_progress` hears how far loading is."""
        self.size = len(begun)
        self._begun = begun
        self._on_progress = on_progress
        self._arrived = arrived
        self._metrics = metrics
        self._ranks: list[_Rank] = []
        self._step_timeout = float("inf")
        self._flight: deque[Plan] = deque()
        self._since = 0.0  # when the oldest plan in flight began
        self._pace = _Pace()

    # ---- life

    async def start(self) -> None:
        """Open a channel to every process."""
        for rank, child in enumerate(self._begun):
            channel = await AsyncChannel.open(child.socket, WORKERS_END, self._arrived)
            who = f"rank {rank}" if self.size > 1 else "the worker"
            name = f"{who} (process {child.pid})"
            self._ranks.append(_Rank(rank, child, channel, name))

    async def find_devices(self) -> int:
        """Return the number of CUDA devices that the workers see. Raises WorkersLost."""
        return min(found.cuda_devices for found in await self._answers(FoundDevices))

    async def load(self, load: Load) -> list[Loaded]:
        """Load a slice on every rank. Returns each rank's remaining memory and facts.

        Raises WorkersLost.
        """
        self._step_timeout = load.parallel.step_timeout
        self._write(load)
        return await self._answers(Loaded)

    async def allocate(self, config: EngineConfig) -> Started:
        """Allocate every rank's memory. Returns the embeddings that the first finds on disk.

        Raises WorkersLost.
        """
        self._write(StartWorker(config))
        return (await self._answers(Started))[0]

    async def close(self) -> None:
        """End the processes in order, and kill those that stay."""
        self._write(Finish())
        await asyncio.gather(*(rank.child.end(FINISH_SECONDS) for rank in self._ranks))

    async def kill(self) -> None:
        """End the processes at once. Also after `close`."""
        await asyncio.gather(*(rank.child.end() for rank in self._ranks))

    # ---- steps

    def send(self, plan: Plan) -> None:
        """Send a plan to every rank, to run after earlier plans."""
        if not self._flight:
            self._since = time.monotonic()
        self._flight.append(plan)
        self._write(plan)

    def send_masks(self, masks: Masks) -> None:
        """Send the masks for the oldest plan in flight to the sampling rank."""
        self._ranks[0].channel.send(masks)

    def halt(self) -> None:
        """End the plans in flight with the step being computed."""
        self._write(CancelSteps())

    @property
    def in_flight(self) -> int:
        """Return how many sent plans still wait for `take_answers`."""
        return len(self._flight)

    def take_answers(self) -> list[tuple[Plan, StepResult]]:
        """Take the answers to plans in flight, in order: one for each step, with its plan.

        Raises AssertionError for an answer to another plan.
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

    # ---- trouble

    def tick(self) -> None:
        """Count a heartbeat. Call every `child.HEARTBEAT_SECONDS`."""
        for rank in self._ranks:
            rank.silence.tick()

    @property
    def in_trouble(self) -> bool:
        """Return True if the workers must give up, for a reason that `explain` gives."""
        return self._timed_out or any(rank.in_trouble for rank in self._ranks)

    async def explain(self) -> str:
        """Describe which worker failed first, and how."""
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
        """Return why a step is late, or an empty text while all is well."""
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

    def _write(self, message: ToWorker) -> None:
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
