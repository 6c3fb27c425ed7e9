"""Chunked prefill and images: the end of a chunk, and its images.

Owns no state. Asks the image scheduler for available images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from saccade.cache.content import overlapping
from saccade.cache.embeddings import EmbeddingCache
from saccade.core.types import Image, ImageKey, Span
from saccade.sched.builder import PlanBuilder
from saccade.sched.images.image_scheduler import ImageScheduler
from saccade.sched.kv_cache_manager import KVCacheManager
from saccade.sched.limits import Counts, SchedulerLimits
from saccade.sched.sequence import Run, Sequence

Spans = tuple[Span, ...]
Images = Many[Image]


class ChunkLimit(NamedTuple):
    """The limit of a chunk. `end` stops before `missing`, the first missing image."""

    end: int
    missing: ImageKey | None


def chunk_limit(
    spans: Spans, images: Images, start: int, goal: int, showable: Callable[[ImageKey], bool]
) -> ChunkLimit:
    """Return the limit of a chunk from `start` towards `goal`."""
    for span in overlapping(spans, start, goal):
        key = images[span.image].key
        if not showable(key):
            return ChunkLimit(max(start, span.start), key)
    return ChunkLimit(goal, None)


def whole(spans: Spans, start: int, end: int) -> int:
    """Return where a chunk from `start` ends without the image that it would show in part."""
    for span in overlapping(spans, end - 1, end):
        if end < span.end:
            return max(start, span.start)
    return end


class ImageChunks:
    """The images that sequences' chunks may show."""

    def __init__(
        self,
        image_scheduler: ImageScheduler,
        embeddings: EmbeddingCache,
        kv_cache: KVCacheManager,
        limits: SchedulerLimits,
        counts: Counts,
    ) -> None:
        self._image_scheduler = image_scheduler
        self._embeddings = embeddings
        self._kv_cache = kv_cache
        self._enough = max(1, limits.max_running // 2)
        self._counts = counts
        self._whole = limits.whole_image_tokens > 0

    def chunk_limit(self, sequence: Sequence, tokens: int) -> ChunkLimit:
        """Return the limit of a chunk of at most `tokens` from the sequence's position."""
        start = sequence.position
        goal = min(start + tokens, len(sequence.tokens))
        if start >= sequence.images_end:
            return ChunkLimit(goal, None)
        # A waiting sequence takes its slot first: room for images may be exceeded for running ones.
        if sequence.run is not None and not sequence.shown.chunk_aware:
            missing = self._image_scheduler.missing(sequence)
            if missing is not None:
                return ChunkLimit(start, missing)
        spans, images = sequence.request.spans, sequence.shown.images
        found = chunk_limit(spans, images, start, goal, self._image_scheduler.showable)
        return found._replace(end=self.whole(sequence, start, found.end))

    def whole(self, sequence: Sequence, start: int, end: int) -> int:
        """Cut a chunk [start, end) where images must stay whole. Returns its end."""
        return whole(sequence.request.spans, start, end) if self._whole and end > start else end

    def enough_lack(self, running: Iterable[Sequence]) -> bool:
        """Return True if half of the slots are held by sequences that lack images.

        The other half is for complete sequences.
        """
        return sum(self._image_scheduler.lacks(sequence) for sequence in running) >= self._enough

    def show(
        self, sequence: Sequence, run: Run, end: int, builder: PlanBuilder, may_exceed: bool
    ) -> int:
        """Put a chunk's images on the device.

        Returns the chunk's end within the device's budget.
        """
        if run.planned >= sequence.images_end:
            return end
        images = sequence.shown.images
        spans = tuple(overlapping(sequence.request.spans, run.planned, end))
        chunk = {images[span.image].key for span in spans}
        for span in spans:
            image, cut = images[span.image], max(run.planned, span.start)
            exceed = may_exceed and cut == run.planned
            place = self._image_scheduler.show(
                run, image, builder, chunk, exceed, idle=sequence.idle
            )
            if place is None:
                return cut
            if span.image not in sequence.found:
                if image.key not in sequence.encoded:
                    self._embeddings.count_lookup(place)
                outcome = self._kv_cache.outcome(sequence, span, place)
                sequence.found[span.image] = outcome
                self._counts.images_embedding += outcome.level == "embedding"
        return end
