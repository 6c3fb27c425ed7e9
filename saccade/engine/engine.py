"""The loop: messages in, a plan, a step, news out.

Owns the order of these; the scheduler decides, the worker computes.
"""

from __future__ import annotations

import time
from typing import Protocol

from saccade.core.messages import (
    Abort,
    News,
    PixelsFailed,
    PixelsReady,
    Stop,
    Submit,
    ToEngine,
)
from saccade.core.metrics import Metrics
from saccade.core.plan import Plan, StepResult
from saccade.core.types import Delta, ImageKey
from saccade.engine.link import EngineLink
from saccade.sched.scheduler import Scheduler


class Workers(Protocol):
    """All ranks together."""

    def execute(self, plan: Plan) -> StepResult:
        """Run one step on every rank; the tokens are the same on each."""
        ...


class Engine:
    """Runs until it is told to stop."""

    def __init__(
        self, scheduler: Scheduler, workers: Workers, link: EngineLink, metrics: Metrics
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._link = link
        self._metrics = metrics
        self._deltas: list[Delta] = []
        self._encoded: list[tuple[ImageKey, float, float]] = []
        self._deadline: float | None = None
        self._unadapted = False  # pictures were encoded since the graphs were last fitted to them

    def run(self) -> None:
        """Serve until a `Stop` has been carried out."""
        stuck = False  # nothing can be done before the front sends something
        while not self._finished():
            for message in self._link.receive(self._patience() if stuck else 0.0):
                self._handle(message)
            plan = self._scheduler.plan()
            stuck = plan.empty
            if not plan.empty:
                result = self._workers.execute(plan)
                self._deltas += self._scheduler.apply(result)
                self._encoded += result.encoded
                if plan.encode:
                    self._unadapted = True
                    most = max(plan.patches, self._metrics.value("saccade_step_patches_largest"))
                    self._metrics.set("saccade_step_patches_largest", most)
            elif self._unadapted and self._scheduler.idle:
                # One graph at a time: whatever comes in meanwhile goes first.
                self._unadapted = self._workers.execute(Plan(plan.step, adapt=True)).unfinished
                stuck = False
            self._report()

    def _finished(self) -> bool:
        if self._deadline is None:
            return False
        if time.monotonic() >= self._deadline:
            self._deltas += self._scheduler.fail_all("the server is shutting down")
            self._report()
        return self._scheduler.idle

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _handle(self, message: ToEngine) -> None:
        scheduler = self._scheduler
        match message:
            case Submit(request) if self._deadline is None:
                self._deltas += scheduler.add(request)
            case Submit(request):
                self._deltas.append(
                    Delta(request.id, finish="error", error="the server is shutting down")
                )
            case Abort(id):
                self._deltas += scheduler.abort(id)
            case PixelsReady(key):
                self._deltas += scheduler.pixels_ready(key)
            case PixelsFailed(key, error):
                self._deltas += scheduler.pixels_failed(key, error)
            case Stop(grace):
                self._deadline = time.monotonic() + grace

    def _report(self) -> None:
        """Send what has come together since the last report, if anything has."""
        notices = self._scheduler.take_notices()
        measure(self._scheduler, self._metrics)
        news = News(
            tuple(self._deltas),
            notices.want,
            notices.unwanted,
            tuple(self._encoded),
            self._metrics.changed(),
        )
        self._deltas, self._encoded = [], []
        if news != News():
            self._link.send(news)


def measure(scheduler: Scheduler, metrics: Metrics) -> None:
    """Copy the scheduler's counts and levels into the metrics that users see."""
    counts, pool, embeddings = scheduler.counts, scheduler.pool, scheduler.embeddings
    for name, value in (
        ("saccade_images_encoded_total", counts.images_encoded),
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
    metrics.set("saccade_arena_bytes_in_use", scheduler.gallery.slots.bytes_in_use)
    for tier, shelf in embeddings.tiers.items():
        metrics.set("saccade_embedding_hits_total", embeddings.hits[tier], tier=tier)
        metrics.set("saccade_embedding_misses_total", embeddings.misses[tier], tier=tier)
        metrics.set("saccade_embedding_cache_bytes", shelf.used_bytes, tier=tier)
        metrics.set("saccade_embedding_evictions_total", shelf.evictions, tier=tier)
    cached = scheduler.prefix.pages if scheduler.prefix else 0
    metrics.set("saccade_kv_pages", pool.free, owner="free")
    metrics.set("saccade_kv_pages", cached, owner="prefix")
    metrics.set("saccade_kv_pages", pool.capacity - pool.free - cached, owner="sequences")
