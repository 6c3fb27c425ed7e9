"""Chunked prefill of prompts with images: decides where a chunk ends and which images it uses."""

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
    """Where a chunk ends, and the unavailable image at which it stops (`missing`), if any."""

    end: int
    missing: ImageKey | None


def chunk_limit(
    spans: Spans, images: Images, start: int, goal: int, showable: Callable[[ImageKey], bool]
) -> ChunkLimit:
    """Return the end of a chunk that starts at `start` and may extend to `goal`.

    It stops at the first image that is not available.

    showable: returns True if an image is available.
    """
    for span in overlapping(spans, start, goal):
        key = images[span.image].key
        if not showable(key):
            return ChunkLimit(max(start, span.start), key)
    return ChunkLimit(goal, None)


def whole(spans: Spans, start: int, end: int) -> int:
    """Return `end`, or the start of the image that a chunk `[start, end)` would split."""
    for span in overlapping(spans, end - 1, end):
        if end < span.end:
            return max(start, span.start)
    return end


class ImageChunks:
    """Ends chunks at the first unavailable image, and puts the images of a chunk on the device."""

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
        """Return the end of the next chunk, which has at most `tokens` tokens."""
        start = sequence.position
        goal = min(start + tokens, len(sequence.tokens))
        if start >= sequence.images_end:
            return ChunkLimit(goal, None)
        # Only for running sequences: a waiting one is admitted first, because the device's budget
        # for images may be exceeded for a running sequence.
        if sequence.run is not None and not sequence.shown.chunk_aware:
            missing = self._image_scheduler.missing(sequence)
            if missing is not None:
                return ChunkLimit(start, missing)
        spans, images = sequence.request.spans, sequence.shown.images
        found = chunk_limit(spans, images, start, goal, self._image_scheduler.showable)
        return found._replace(end=self.whole(sequence, start, found.end))

    def whole(self, sequence: Sequence, start: int, end: int) -> int:
        """Return `end`, or the start of an image if the model forbids splitting it."""
        return whole(sequence.request.spans, start, end) if self._whole and end > start else end

    def enough_lack(self, running: Iterable[Sequence]) -> bool:
        """Return True if sequences with missing images occupy half of the slots or more.

        The other half is reserved for sequences that have all of their images.
        """
        return sum(self._image_scheduler.lacks(sequence) for sequence in running) >= self._enough

    def show(
        self, sequence: Sequence, run: Run, end: int, builder: PlanBuilder, may_exceed: bool
    ) -> int:
        """Put the images of a chunk `[run.planned, end)` on the device, and return the chunk's end.

        The chunk ends before the first image that does not fit in the device's budget.

        may_exceed: the image at the start of the chunk may exceed this budget.
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
