"""Sharing between sequences: where images were found and why not nearer, and whether an older
sequence is computing a wanted prefix.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.cache.prefix import PrefixCache
from saccade.core.plan import Place
from saccade.core.types import ImageOutcome, Missed, Span, Tier
from saccade.sched.sequence import Sequence


def image_outcome(
    sequence: Sequence, span: Span, place: Place, prefix: PrefixCache | None, page_size: int
) -> ImageOutcome:
    """Return the source of an image now shown. `place`: the embedding's place before.

    Where two images have one key, the first is the one encoded for this sequence.
    """
    encoded = sequence.encoded.pop(sequence.shown.images[span.image].key, None)
    lost = encoded.missed if encoded else None
    missed_kv = why_not_in_prefix(prefix, page_size, sequence, span.end, lost)
    if encoded:
        return ImageOutcome(span.image, encoded.source, missed_kv, lost, tiles=encoded.tiles)
    tier: Tier = "disk" if place == "staged" else place
    return ImageOutcome(span.image, "embedding", missed_kv, None, tier)


def why_not_in_prefix(
    prefix: PrefixCache | None, page_size: int, sequence: Sequence, end: int, lost: Missed | None
) -> Missed:
    """Return why the cached prefix stopped before `end`, the end of an image.

    `lost`: why the embedding was missing, if it was.
    """
    if prefix is None or sequence.request.prompt_logprobs is not None:
        return "prefix cache off"
    if lost is not None and lost != "evicted":
        return lost
    if (sequence.cached or 0) // page_size == (end - 1) // page_size:
        return "no full page"
    return "other prompt or evicted" if prefix.evictions else "other prompt"


def has_duplicate_prefix(
    sequence: Sequence, running: Iterable[Sequence], start: int, end: int
) -> bool:
    """Return True if a running sequence has yet to compute `[start, end)` of the same prompt."""
    if end >= len(sequence.tokens):
        return False
    return any(
        start <= other.computed < min(end, other.prompt_length)
        and other.content.partition == sequence.content.partition
        and other.tokens[:end] == sequence.tokens[:end]
        and other.content.shown(0, end) == sequence.content.shown(0, end)
        for other in running
    )
