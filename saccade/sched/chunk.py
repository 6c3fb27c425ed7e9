"""Chunked prefill and images: how far a chunk reaches, and which rows it shows. Owns no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from saccade.cache.content import Content, overlapping
from saccade.core.plan import Splice
from saccade.core.types import ImageKey


class Reach(NamedTuple):
    """A chunk may go to `end`, which is the goal, or where `missing` begins: an image that cannot
    be shown yet.
    """

    end: int
    missing: ImageKey | None


def reach(content: Content, start: int, goal: int, showable: Callable[[ImageKey], bool]) -> Reach:
    """How far a chunk from `start` towards `goal` may go."""
    for span in overlapping(content.spans, start, goal):
        key = content.images[span.image].key
        if not showable(key):
            return Reach(max(start, span.start), key)
    return Reach(goal, None)


def splices(content: Content, start: int, end: int, row: int) -> list[Splice]:
    """Images in tokens `[start, end)`, whose first token is batch row `row`."""
    return [
        Splice(row + position, length, key, offset)
        for position, length, key, offset in content.pictures(start, end)
    ]
