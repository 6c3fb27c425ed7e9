"""Builds the trace of a request, and the spans of its timeline, from its updates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from saccade.api.chat.write import Usage, UsageCounter
from saccade.api.trace.changes import NO_CHANGE, ImageChanges
from saccade.api.trace.image_trace import (
    CacheTrace,
    ImageTrace,
    RequestTimes,
    Trace,
    tiers_of,
    video_traces,
)
from saccade.core.types import CacheReport, DraftCounts, DraftSource
from saccade.front.answer_update import AheadReport, AnswerUpdate, FoundImage, Level
from saccade.front.prepared import PreparedRequest

MAX_TRACED_IMAGES = 32
"""Maximum number of images in a request that have their own spans."""
Figure = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Leg:
    """A span in the timeline of a request. Times are in `time.monotonic()` seconds."""

    name: str
    begun: float
    ended: float
    figures: Mapping[str, Figure] = field(default_factory=dict)


def _by_source(guesses: Iterable[DraftCounts]) -> list[DraftCounts]:
    found: dict[DraftSource, DraftCounts] = {}
    for each in guesses:
        before = found.get(each.source, DraftCounts(each.source, 0, 0))
        right, wrong = before.right + each.right, before.wrong + each.wrong
        found[each.source] = DraftCounts(each.source, right, wrong)
    return list(found.values())


class Tracer:
    """Collects the updates of one request.

    wanted: the client requested the trace.
    changes: compares the request's images, if the trace was requested.
    receive_ms: how long the body took to arrive.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedRequest],
        wanted: bool,
        changes: ImageChanges | None = None,
        receive_ms: float = 0.0,
    ) -> None:
        self.wanted = wanted
        self._receive_ms = receive_ms
        self._prepared = prepared[0]
        self._changes = changes
        self._arrival = self._prepared.request.arrival
        self._ready = time.monotonic()
        self.finishes: list[str] = []
        self._first: float | None = None
        self._last = 0.0
        self._admitted = 0.0
        self._found: tuple[FoundImage, ...] = ()
        self._prompt = CacheTrace(0)
        self._ahead: AheadReport | None = None
        self._draft_counts: dict[tuple[int, DraftSource], DraftCounts] = {}

    def add_update(self, event: AnswerUpdate) -> None:
        self._last = time.monotonic()
        self._draft_counts |= {(event.choice, each.source): each for each in event.draft_counts}
        self._ahead = self._ahead or event.ahead
        if event.finish is not None:
            self.finishes.append(event.finish)
        if self._first is None and event.scores is None:
            self._first = self._last
            self._admitted = event.admitted
            report = event.caching or CacheReport()
            kept = {f"{seconds}s": tokens for seconds, tokens in report.written}
            self._prompt = CacheTrace(
                event.cached.total,
                tiers_of(*event.cached),
                kept,
                report.missed,
            )
        # Only chats have images, and a chat has one prompt, so its first answer has them all.
        if event.found and event.choice == 0:
            self._found = event.found

    @property
    def arrival(self) -> float:
        """When the body had been read, in `time.monotonic()` seconds."""
        return self._arrival

    @property
    def first(self) -> float | None:
        """When the first token was received, in `time.monotonic()` seconds, or None before that."""
        return self._first

    @property
    def levels(self) -> Counter[Level]:
        """The number of images by the cache level at which they were found."""
        return Counter(found.level for found in self._found)

    def legs(self) -> Iterator[Leg]:
        """Yield the spans of the request, and those of its first `MAX_TRACED_IMAGES` images."""
        yield Leg("prepare", self._arrival, self._ready)
        named = list(zip(self._prepared.opened, self._prepared.places, strict=True))
        for image, place in named[:MAX_TRACED_IMAGES]:
            begun = image.times.begun
            fetched = begun + image.times.fetch_ms / 1e3
            digested = fetched + image.times.digest_ms / 1e3
            sent: Mapping[str, Figure] = {"place": place, "bytes": image.nbytes}
            yield Leg("image.fetch", begun, fetched, sent)
            rows, columns = image.image.canvas
            size: Mapping[str, Figure] = {
                "place": place,
                "format": image.probe.format,
                "width": columns,
                "height": rows,
            }
            yield Leg("image.digest", fetched, digested, size)
        for found in self._found[:MAX_TRACED_IMAGES]:
            image, place = named[found.image]
            if found.decode_ms:
                begun = found.decoded - found.decode_ms / 1e3
                yield Leg("image.decode", begun, found.decoded, {"place": place})
            if found.ship_ms:
                begun = found.shipped - found.ship_ms / 1e3
                yield Leg("image.ship", begun, found.shipped, {"place": place})
            if found.encode_ms:
                begun = found.encoded - found.encode_ms / 1e3
                cost: Mapping[str, Figure] = {"place": place, "tokens": image.image.num_tokens}
                if found.tiles:
                    seen = len(found.tiles) - sum(found.tiles)
                    cost = {**cost, "tiles_seen": seen, "tiles_new": sum(found.tiles)}
                yield Leg("image.encode", begun, found.encoded, cost)
        yield from self._engine_legs()

    def _engine_legs(self) -> Iterator[Leg]:
        if self._first is None:  # the engine has reported nothing yet
            yield Leg("wait", self._ready, time.monotonic())
            return
        begun = self._admitted or self._first
        yield Leg("queue", self._ready, begun)
        if self._admitted:
            cached = self._prompt.cached_tokens
            computed = len(self._prepared.request.tokens) - cached
            figures = {"cached_tokens": cached, "computed_tokens": computed}
            yield Leg("prefill", begun, self._first, figures)
        yield Leg("decode", self._first, self._last)

    @property
    def seconds(self) -> float:
        """The number of seconds since the request arrived."""
        return time.monotonic() - self._arrival

    @property
    def trace(self) -> Trace:
        """The trace in API format. Read this after the answer has ended."""
        opened, places = self._prepared.opened, self._prepared.places
        changes = {} if self._changes is None else self._changes.by_image()
        images = [
            ImageTrace.found_at(
                found,
                opened[found.image],
                places[found.image],
                self._arrival,
                changes.get(found.image, NO_CHANGE),
            )
            for found in self._found
        ]
        now = time.monotonic()
        first = now if self._first is None else self._first
        admitted = self._admitted or first  # one that was never started has waited until the end

        def ms_until(moment: float) -> float:
            return round((moment - self._arrival) * 1e3, 3)

        return Trace(
            images,
            RequestTimes(
                ms_until(self._ready),
                ms_until(admitted),
                ms_until(first),
                ms_until(now),
                round(self._receive_ms, 3),
            ),
            self._prompt,
            self._prepared.ignored or UNSET,
            video_traces(self._found, opened, places) or UNSET,
            _by_source(self._draft_counts.values()) or UNSET,
            self._ahead or UNSET,
        )


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """The outcome of a request: its usage, finish reasons, cache levels and spans."""

    arrival: float  # `time.monotonic()` when the body had been read
    first: float | None  # `time.monotonic()` at the first token
    limits: Mapping[str, int | float]  # the request's sampling, with OpenTelemetry's names
    count: int  # number of answers
    usage: Usage
    finishes: tuple[str, ...]  # finish reasons, in the order in which the answers ended
    images: int  # number of images
    levels: Mapping[Level, int]  # number of images found at each level
    legs: tuple[Leg, ...]

    @classmethod
    def of(
        cls, prepared: Sequence[PreparedRequest], tally: UsageCounter, tracer: Tracer
    ) -> AnswerSummary:
        sampling = prepared[0].request.sampling
        return cls(
            tracer.arrival,
            tracer.first,
            sampling.limits,
            sum(each.n for each in prepared),
            tally.usage,
            tuple(tracer.finishes),
            len(prepared[0].opened),
            tracer.levels,
            tuple(tracer.legs()),
        )
