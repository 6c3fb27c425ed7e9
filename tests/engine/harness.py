"""The deciding and the computing half of the engine in one process: the real scheduler drives the
real worker, no sockets.

`run` plays the front's part: it hands over pixels when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from lab.qwen import grids
from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets, EngineConfig, SnapshotConfig
from saccade.core.messages import ToEngine, ToFront
from saccade.core.metrics import Metrics
from saccade.core.plan import Masks, Plan, StepResult
from saccade.core.types import Delta, Image, ImageKey, Request, SamplingParams
from saccade.engine.engine import Engine
from saccade.engine.guides import Guides
from saccade.engine.language import LanguageHalf
from saccade.engine.process import build_scheduler
from saccade.nn.protocol import FamilyNet
from saccade.runtime.worker import Worker
from saccade.sched.masks import Guide, Matchers

THREADS = ThreadPoolExecutor(1)
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    context_length=4096,
    max_running=8,
    chunk_tokens=2048,
    page_size=16,
    kv_pages=1024,
    prefix_cache=True,
    embeddings=EmbeddingBudgets(64 << 20),
    encode_patches=1 << 16,
    snapshots=SnapshotConfig(64, 256),
)


@dataclass
class Outcome:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    levels: list[str] = field(default_factory=list)
    tiers: list[str | None] = field(default_factory=list)
    error: str | None = None
    scores: list[tuple[list[int], list[float], int]] = field(default_factory=list)


class Workers(Protocol):
    """One worker or several."""

    def execute(self, plan: Plan) -> StepResult: ...


class Crew(Protocol):
    """Several ranks (see `tests/parallel/crew.py`)."""

    def hire(self, config: EngineConfig, arena: Arena) -> Workers: ...


class Harness:
    """One engine without processes.

    `pixels` are the resized pictures by key. Works with one worker, or with a crew.
    """

    def __init__(
        self,
        net: FamilyNet,
        crew: Crew | None = None,
        arena: Arena | None = None,
        **changes: object,
    ) -> None:
        self.net = net
        self.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.arena = arena or Arena.create(64 << 20)
        self.worker: Workers = (
            crew.hire(self.config, self.arena) if crew else Worker(net, self.config, self.arena)
        )
        saved = self.worker.images.saved if isinstance(self.worker, Worker) else ()
        self.scheduler = build_scheduler(self.config, net.spec, saved, self.arena.size, 0.5)
        self.pixels: dict[ImageKey, np.ndarray] = {}
        self.encoded: list[ImageKey] = []
        self.decoded: list[ImageKey] = []
        self.preemptions = 0
        self.steps = 0
        self.matchers: Matchers | None = None
        self.slow_seconds = float("inf")  # `run` waits for no thread

    def close(self) -> None:
        """Finish what is being written to disk."""
        if isinstance(self.worker, Worker):
            self.worker.close()

    def image(self, pixels: np.ndarray, name: str) -> Image:
        """Name a resized picture uint8 [H, W, 3]."""
        key = ImageKey(name.encode().ljust(32, b"\0"), bytes(16))
        self.pixels[key] = pixels
        spec, size = self.net.spec, (pixels.shape[0], pixels.shape[1])
        (grid,) = grids(spec, [pixels])
        return Image(key, grid, spec.num_tokens(grid), spec.num_patches(grid), size)

    def guide(self, grammar: str) -> Guide:
        """Of a grammar, where `matchers` is set; its masks are slow beyond `slow_seconds`."""
        assert self.matchers is not None
        matcher = self.matchers.begin(grammar)
        return Guide(matcher, self.matchers.words, THREADS, lambda: None, self.slow_seconds)

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        images: Sequence[Image] = (),
        **sampling: Any,
    ) -> Request:
        """`tokens` hold one placeholder per picture."""
        expanded, spans = self.net.spec.expand_prompt(tokens, images)
        top = sampling.pop("prompt_logprobs", None)
        params = SamplingParams(**{"ignore_eos": True, **sampling})
        return Request(id, expanded, spans, tuple(images), params, prompt_logprobs=top)

    def run(
        self, requests: Sequence[Request], between: Callable[[Plan], None] | None = None
    ) -> Mapping[str, Outcome]:
        """Run all requests side by side to their ends."""
        outcomes = {request.id: Outcome() for request in requests}
        for request in requests:
            guide = self.guide(request.grammar) if request.grammar else None
            for delta in self.scheduler.add(request, guide):
                self._note(outcomes[delta.id], delta)
        idle = 0
        while not self.scheduler.idle:
            self._answer_notices()
            plan = self.scheduler.plan()
            idle = idle + 1 if plan.empty else 0
            assert idle < 3, "the scheduler waits for something that never comes"
            if plan.empty:
                continue
            self.steps += 1
            assert plan.num_tokens <= self.config.chunk_tokens + self.config.max_running
            self.encoded += [encode.key for encode in plan.encode]
            masks, deltas = self.scheduler.take_masks()
            deltas += self.scheduler.apply(carry_out(self.worker, plan, masks))
            for delta in deltas:
                self._note(outcomes[delta.id], delta)
            self.scheduler.audit()
            if between is not None:
                between(plan)
        self._answer_notices()
        return outcomes

    def _answer_notices(self) -> None:
        for key, slot in self.scheduler.take_notices().want:
            self.arena.view(slot)[:] = self.pixels[key]
            self.decoded.append(key)
            for delta in self.scheduler.pixels_ready(key):
                raise AssertionError(delta)

    def _note(self, outcome: Outcome, delta: Delta) -> None:
        if delta.scores:
            assert delta.scores.start == 1 + len(outcome.scores), "each score comes once, in order"
            assert not outcome.tokens
            outcome.scores += delta.scores.read()
        elif not outcome.tokens:
            outcome.cached_tokens = delta.cached_tokens
            outcome.levels = [picture.level for picture in delta.images]
            outcome.tiers = [picture.tier for picture in delta.images]
        outcome.tokens += delta.tokens
        outcome.error = outcome.error or delta.error
        if delta.finish:
            outcome.finish.append(delta.finish)


class Arrivals(asyncio.Event):
    """For an engine and a front in one process: an engine that waits although nothing has arrived
    has nothing else to do, and `idle` is called.
    """

    def __init__(self, idle: Callable[[], None]) -> None:
        super().__init__()
        self._idle = idle

    async def wait(self) -> Literal[True]:
        if not self.is_set():
            self._idle()
            self.set()
        return await super().wait()


class Inline:
    """Workers without processes: a plan is carried out when it is sent. Notes every plan."""

    in_trouble = False
    overdue = ""

    def __init__(self, workers: Workers, arrived: asyncio.Event) -> None:
        self.workers = workers
        self.arrived = arrived
        self.plans: list[Plan] = []
        self.answered: list[tuple[Plan, StepResult]] = []
        self.waiting: list[Plan] = []

    @property
    def in_flight(self) -> int:
        return len(self.answered) + len(self.waiting)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.waiting.append(plan)
        if not any(row.masked for row in self.waiting[0].rows):
            self._carry_out(None)

    def send_masks(self, masks: Masks) -> None:
        self._carry_out(masks)

    def _carry_out(self, masks: Masks | None) -> None:
        """The oldest plan that waits, and what waits behind it for nothing else."""
        while self.waiting:
            plan = self.waiting[0]
            if any(row.masked for row in plan.rows) and masks is None:
                break
            self.answered.append((plan, carry_out(self.workers, self.waiting.pop(0), masks)))
            masks = None
        self.arrived.set()

    def take(self) -> list[tuple[Plan, StepResult]]:
        answered, self.answered = self.answered, []
        return answered

    def tick(self) -> None: ...

    async def explain(self) -> str:
        return ""


class InlineFront(Protocol):
    """The front's part, in the engine's process."""

    over: bool

    def take(self) -> list[ToEngine]: ...

    def send(self, message: ToFront) -> None: ...

    def idle(self) -> None:
        """The engine waits for a message."""
        ...


def carry_out(workers: Workers, plan: Plan, masks: Masks | None) -> StepResult:
    """One step with its masks, if it has any."""
    if masks is None:
        return workers.execute(plan)
    assert isinstance(workers, Worker) and masks.step == plan.step
    return workers.begin(plan, masks.rows).result()


def run_engine(harness: Harness, front: InlineFront) -> list[Plan]:
    """The engine's loop between a front and the harness's workers; the plans that it sent."""

    async def run() -> list[Plan]:
        arrived = Arrivals(front.idle)
        send = front.send

        def send_and_wake(message: ToFront) -> None:
            send(message)
            arrived.set()  # it may have answered

        front.send = send_and_wake  # type: ignore[method-assign]
        workers = Inline(harness.worker, arrived)
        guides = Guides(arrived.set)
        language = LanguageHalf(harness.scheduler, guides)
        await Engine(harness.scheduler, workers, front, arrived, Metrics(), language).run()
        return workers.plans

    return asyncio.run(asyncio.wait_for(run(), 60))


def set_threads() -> None:
    """One thread: tiny matrices are faster, and machines are shared."""
    torch.set_num_threads(1)
