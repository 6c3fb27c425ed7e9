"""Runs the engine loop, which handles messages, sends plans to the workers, and reports results to
the front end.

The scheduler makes the decisions, and the workers compute. The loop never waits for a step. It
handles messages while the workers compute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from saccade.core.metrics import Metrics
from saccade.core.plan import ADAPT, PLANS_IN_FLIGHT, Changed, Masks, Plan, StepResult
from saccade.core.types import Delta, Image, ImageKey, Request
from saccade.engine.language import LanguageHalf
from saccade.engine.memory_watch import MemoryWatch
from saccade.engine.workers import WorkersLost
from saccade.ipc.child import HEARTBEAT_SECONDS
from saccade.ipc.messages import (
    Abort,
    Alter,
    Altered,
    EmbeddingReady,
    Flush,
    Heartbeat,
    MetricValues,
    Output,
    Pause,
    PixelsFailed,
    PixelsReady,
    Resume,
    Scrape,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    TokenizerText,
)

if TYPE_CHECKING:
    from saccade.engine.changes import Changes
    from saccade.engine.pause import PauseState
    from saccade.engine.store_lookup import StoreProbe
    from saccade.sched.protocol import Scheduler

UNPAUSED = (
    "the server must be paused to change weights or memory: POST /pause (mode abort or wait), "
    "then resume"
)


class FrontLink(Protocol):
    """The engine's end of the channel to the front end, such as `child.AsyncChannel`."""

    @property
    def over(self) -> bool:
        """Return True if the front end has disconnected."""
        ...

    def take_messages(self) -> Sequence[ToEngine]:
        """Remove and return the messages received so far."""
        ...

    def send(self, message: ToFront) -> None:
        """Queue a message, without blocking."""
        ...


class Ranks(Protocol):
    """The interface to all workers of a model, such as `engine.workers.Workers`."""

    @property
    def in_trouble(self) -> bool:
        """Return True if the workers have failed, so that the engine must exit."""
        ...

    @property
    def overdue(self) -> str:
        """The reason why the current step takes longer than expected, or "" if it does not."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of plans that were sent but do not have all results yet."""
        ...

    def send(self, plan: Plan) -> None:
        """Queue a plan for the workers, without blocking. It runs after all earlier plans."""
        ...

    def send_masks(self, masks: Masks) -> None:
        """Queue the masks for the oldest plan in flight, without blocking."""
        ...

    def halt(self) -> None:
        """Cancel all steps that the workers have not started, without blocking."""
        ...

    def take_answers(self) -> Sequence[tuple[Plan, StepResult]]:
        """Remove and return the results received so far, in order. Each step has one, with its
        plan.
        """
        ...

    def tick(self) -> None:
        """Update the time since the last heartbeat. Call this every `child.HEARTBEAT_SECONDS`."""
        ...

    async def explain(self) -> str:
        """Return why the workers have failed."""
        ...


class EnginePart(Protocol):
    """The part of the engine that a plugin provides (`plugin.Scheduling.engine_part`)."""

    decided: tuple[tuple[str, str], ...]  # for the start-up report

    def measure(self, metrics: Metrics) -> None:
        """Copy counters and gauges to `metrics`."""
        ...

    def close(self) -> None:
        """Release resources. Called once the loop has ended without an error."""
        ...


class Engine:
    """The engine loop of one model, between the front end and the workers."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Ranks,
        front: FrontLink,
        arrived: asyncio.Event,
        metrics: Metrics,
        language: LanguageHalf | None,
        depth: int = PLANS_IN_FLIGHT,
        probe: StoreProbe | None = None,
        memory: MemoryWatch | None = None,
        parts: Sequence[EnginePart] = (),
        *,
        deferred: bool = False,
    ) -> None:
        """Prepare the loop.

        arrived: an event that is set when the front end or the workers have sent messages, or a
            grammar is ready.
        language: None for a server that only encodes images.
        depth: the maximum number of plans in flight.
        probe: looks up embeddings in a directory shared with other servers, or None without one.
        memory: evicts cached data while memory is short, or None on a GPU.
        deferred: True if CUDA graphs remain to be captured.
        """
        self._scheduler = scheduler
        self._workers = workers
        self._front = front
        self._arrived = arrived
        self._metrics = metrics
        self._language = language
        self._depth = depth
        self._probe = probe
        self._memory = memory
        self._parts = parts
        self._changes: Changes | None = None  # created with the first change
        self._pause: PauseState | None = None  # created with the first pause
        self._deltas: list[Delta] = []
        self._encoded: list[tuple[ImageKey, float, float]] = []
        self._deadline: float | None = None
        # Graphs were deferred, or images were encoded since the graphs were last adapted to them.
        self._unadapted = deferred

    async def run(self) -> None:
        """Serve until a `Stop` has been carried out, or the front end has disconnected.

        Raises WorkersLost.
        """
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                self._arrived.clear()
                for message in self._front.take_messages():
                    self._handle(message)
                for request, sight in self._probe.take_ready() if self._probe else ():
                    for image, there in sight:
                        self._scheduler.embeddings.seen_in_store(image, there)
                    self._enter(request)
                self._deltas += self._language.add_with_grammar() if self._language else []
                for plan, result in self._workers.take_answers():
                    self._apply(plan, result)
                self._leave_pause()
                self._plan()
                self._report()
                self._settle_pause()
                if self._workers.in_trouble:
                    raise WorkersLost(await self._workers.explain())
                if beat.done():
                    beat.result()
                if self._finished():
                    return
                await self._arrived.wait()
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._workers.tick()
            self._front.send(Heartbeat(self._workers.overdue))
            if self._memory is not None:
                self._memory.tick()
            self._arrived.set()  # wake the loop to check deadlines

    def _finished(self) -> bool:
        if self._front.over:
            return True
        if self._deadline is None:
            return False
        if time.monotonic() >= self._deadline:
            self._fail_all("the server is shutting down")
            self._report()
            return True
        changing = self._changes is not None and self._changes.under_way
        waits = self._pause is not None and self._pause.waiting
        in_flight = self._workers.in_flight or self._has_waiting() or changing or waits
        return self._scheduler.idle and not in_flight

    def _has_waiting(self) -> bool:
        return any(each.waiting for each in (self._language, self._probe) if each)

    @property
    def _model_changes(self) -> Changes:
        if self._changes is None:
            from saccade.engine.changes import Changes

            self._changes = Changes(self._scheduler.image_scheduler.encodes_with)
        return self._changes

    @property
    def _pause_state(self) -> PauseState:
        if self._pause is None:
            from saccade.engine.pause import PauseState

            self._pause = PauseState()
        return self._pause

    def _leave_pause(self) -> None:
        """End the pause if that was requested, no change is pending, and memory is allocated
        again.
        """
        if self._pause is None or not self._pause.leaving:
            return
        if self._changes is not None and self._changes.halts:
            return
        held, altered = self._pause.leave()
        for request in held:
            self._begin(request)
        for each in altered:
            self._front.send(each)

    def _settle_pause(self) -> None:
        """Answer pending pause requests if all work is finished or frozen."""
        if self._pause is None or self._workers.in_flight:
            return
        idle = self._pause.keeps or (self._scheduler.idle and not self._has_waiting())
        for altered in self._pause.settle(idle):
            self._front.send(altered)

    def _fail_all(self, error: str) -> None:
        for owner in (self._scheduler, self._language, self._probe, self._pause):
            self._deltas += owner.fail_all(error) if owner else []

    def _handle(self, message: ToEngine) -> None:
        scheduler = self._scheduler
        match message:
            case Submit(request, aliases):
                self._submit(request, aliases)
            case Abort(id):
                self._abort(id)
            case PixelsReady(key, pixels, tiles):
                self._deltas += scheduler.pixels_ready(key, pixels, tiles)
            case EmbeddingReady(key):
                assert self._language is not None, "a server of role encode cannot use encoders"
                self._deltas += self._language.embedding_ready(key)
            case PixelsFailed(key, error):
                self._deltas += scheduler.pixels_failed(key, error)
            case Flush(embeddings):
                scheduler.flush(embeddings)
            case Alter():
                self._alter(message)
            case Pause(id, mode):
                if mode == "abort":
                    self._fail_all("the server was paused")
                self._pause_state.begin_pause(id, keeps=mode == "keep")
            case Resume(id):
                self._pause_state.end_pause(id)
            case Scrape():
                self._scrape()
            case Stop(grace):
                self._deadline = time.monotonic() + grace
            case TokenizerText(tokenizer_json):
                assert self._language is not None, "no answers, no grammars"
                self._language.read_tokenizer(tokenizer_json)

    def _submit(self, request: Request, aliases: Iterable[tuple[ImageKey, Image]]) -> None:
        if self._deadline is not None:
            error = "the server is shutting down"
            self._deltas.append(Delta(request.id, finish="error", error=error))
            return
        for key, image in aliases:
            self._scheduler.image_scheduler.aliases.learn(key, image)
        if request.adapter.number:
            self._model_changes.entered(request)
        if self._pause is not None and self._pause.holds:
            self._pause.hold_request(request)
        else:
            self._begin(request)

    def _abort(self, id: str) -> None:
        if any(each.drop(id) for each in self._owners if each):
            self._deltas.append(Delta(id, finish="abort"))
        else:
            self._deltas += self._scheduler.abort(id)

    def _alter(self, alter: Alter) -> None:
        changes = self._model_changes
        if changes.is_exclusive(alter.change) and not self._pause_state.empty:
            self._front.send(Altered(alter.id, Changed(UNPAUSED)))
            return
        if alter.change.kind == "sleep":
            self._scheduler.flush(embeddings=True, disk=False)
        changes.add(alter)

    def _scrape(self) -> None:
        measure(self._scheduler, self._metrics)
        if self._language is not None:
            self._language.measure(self._metrics)
        for part in self._parts:
            part.measure(self._metrics)
        self._front.send(MetricValues(self._metrics.changed()))

    @property
    def _owners(self) -> tuple[LanguageHalf | StoreProbe | PauseState | None, ...]:
        """The objects that hold requests until these are passed to the scheduler."""
        return self._language, self._probe, self._pause

    def _begin(self, request: Request) -> None:
        if self._probe is None or not self._begin_probe(self._probe, request):
            self._enter(request)

    def _begin_probe(self, probe: StoreProbe, request: Request) -> bool:
        """Look up embeddings in the shared directory.

        Returns True if the request must wait for the result.
        """
        embeddings = self._scheduler.embeddings
        absent = [image for image in request.images if not embeddings.ready(image.key)]
        return bool(absent) and probe.begin_probe(request, absent)

    def _enter(self, request: Request) -> None:
        if request.grammar and self._language is not None:
            self._language.prepare_grammar(request)
        else:
            self._deltas += self._scheduler.add_request(request)

    def _plan(self) -> None:
        """Send plans until `depth` are in flight, or there is no more work.

        Cancels a plan of several steps if other work has arrived.
        """
        if self._language is not None and self._language.take_cancel():
            self._workers.halt()
        while self._workers.in_flight < self._depth:
            frozen = self._pause is not None and self._pause.freezes
            # In a pause that is `empty` there are no requests, so a plan only moves cached data.
            rests = frozen and not self._pause_state.empty
            plan = Plan(self._scheduler.counts.steps) if rests else self._scheduler.plan()
            if self._changes is not None and (change := self._changes.take_change()) is not None:
                plan = replace(plan, change=change)
            if not plan.empty:
                self._send(plan)
            elif (
                self._unadapted
                and not frozen
                and self._scheduler.idle
                and not self._workers.in_flight
            ):
                # One graph at a time, so that requests which arrive meanwhile are computed first.
                self._send(Plan(plan.step, change=ADAPT))
            else:
                return

    def _send(self, plan: Plan) -> None:
        self._workers.send(plan)
        self._send_masks()
        if plan.patches:
            self._unadapted = True
            most = max(plan.patches, self._metrics.value("saccade_max_step_patches"))
            self._metrics.set("saccade_max_step_patches", most)

    def _apply(self, plan: Plan, result: StepResult) -> None:
        if plan.adapt:
            self._unadapted = result.unfinished
            return
        if plan.change is not None and result.changed is not None:
            self._front.send(self._model_changes.made(result.changed))
            renewed = plan.change.kind == "weights" and not result.changed.error
            if renewed or (result.changed.tower and plan.change.kind == "wake"):
                self._scheduler.flush(embeddings=result.changed.tower)
        if plan.planned:
            self._deltas += self._scheduler.apply(result)
            self._encoded += result.encoded
            self._send_masks()

    def _send_masks(self) -> None:
        if self._language is None:
            return
        masks, deltas = self._language.take_masks()
        if masks is not None:
            self._workers.send_masks(masks)
        self._deltas += deltas

    def _report(self) -> None:
        if self._changes is not None:
            self._changes.ended(self._deltas)
        notices = self._scheduler.take_notices()
        output = Output(
            tuple(self._deltas),
            notices.want,
            notices.unwanted,
            tuple(self._encoded),
            notices.aliases,
        )
        self._deltas, self._encoded = [], []
        if output != Output():
            self._front.send(output)


def measure(scheduler: Scheduler, metrics: Metrics) -> None:
    """Copy the scheduler's counters and gauges to `metrics`."""
    counts, embeddings = scheduler.counts, scheduler.embeddings
    for name, value in (
        ("saccade_images_encoded_total", counts.images_encoded),
        ("saccade_duplicate_images_total", counts.images_same),
        ("saccade_image_patches_encoded_total", counts.patches_encoded),
        ("saccade_prompt_tokens_total", counts.prompt_tokens),
        ("saccade_cached_tokens_total", counts.cached_tokens),
        ("saccade_generated_tokens_total", counts.generated_tokens),
        ("saccade_steps_total", counts.steps),
        ("saccade_preemptions_total", counts.preemptions),
        ("saccade_requests_running", len(scheduler.running)),
        ("saccade_requests_waiting", len(scheduler.waiting)),
    ):
        metrics.set(name, value)
    metrics.set("saccade_image_hits_total", counts.images_kv, level="kv")
    metrics.set("saccade_image_hits_total", counts.images_embedding, level="embedding")
    metrics.set("saccade_image_hits_total", counts.images_pixels, level="pixels")
    metrics.set("saccade_image_hits_total", counts.images_given, level="encoder")
    metrics.set("saccade_image_tiles_total", counts.tiles_new, outcome="new")
    metrics.set("saccade_image_tiles_total", counts.tiles_seen, outcome="seen")
    metrics.set("saccade_arena_bytes_in_use", scheduler.image_scheduler.slots.bytes_in_use)
    for tier, cache_tier in embeddings.tiers.items():
        metrics.set("saccade_embedding_hits_total", embeddings.hits[tier], tier=tier)
        metrics.set("saccade_embedding_misses_total", embeddings.misses[tier], tier=tier)
        metrics.set("saccade_embedding_cache_bytes", cache_tier.used_bytes, tier=tier)
        metrics.set("saccade_embedding_cache_budget_bytes", cache_tier.budget_bytes, tier=tier)
        metrics.set("saccade_embeddings", len(cache_tier), tier=tier)
        metrics.set("saccade_embedding_evictions_total", cache_tier.evictions, tier=tier)
    embeddings.end_pins()
    metrics.set("saccade_pinned", embeddings.kept_bytes, cache="embeddings")
    metrics.set("saccade_pins", len(embeddings.pins), cache="embeddings")
    metrics.set("saccade_pins_evicted_total", embeddings.pins.given_way, cache="embeddings")
