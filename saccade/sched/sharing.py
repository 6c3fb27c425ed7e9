"""What a sequence may share with others: why the cached prefix ended where it did, and whether an
older sequence is computing what it needs. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.cache.prefix import PrefixCache
from saccade.core.types import Missed
from saccade.sched.sequence import Sequence


def why_not_in_prefix(
    prefix: PrefixCache | None, page_size: int, sequence: Sequence, end: int, lost: Missed | None
) -> Missed:
    """Why the cached prefix did not reach `end`, the end of a picture.

    `lost`: why its embedding was not resident, if it was not.
    """
    if prefix is None:
        return "prefix cache off"
    if lost is not None and lost != "evicted":
        return lost
    if (sequence.cached or 0) // page_size == (end - 1) // page_size:
        return "no full page"
    return "other prompt or evicted" if prefix.evictions else "other prompt"


def has_twin(sequence: Sequence, running: Iterable[Sequence], start: int, end: int) -> bool:
    """Whether a running sequence has yet to compute tokens [start, end) of the same prompt."""
    if end >= len(sequence.tokens):
        return False
    return any(
        not twin.decoding
        and start <= twin.computed < end
        and twin.request.cache_salt == sequence.request.cache_salt
        and twin.tokens[:end] == sequence.tokens[:end]
        and twin.content.pictures(0, end) == sequence.content.pictures(0, end)
        for twin in running
    )
