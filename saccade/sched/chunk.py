"""Chunked prefill and pictures: how far a chunk reaches, and what it shows.

Owns no state but a step's patch budget. Decides nothing about pages or eviction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from saccade.cache.content import Content, overlapping
from saccade.core.plan import Splice
from saccade.core.types import ImageKey


@dataclass(slots=True)
class PatchBudget:
    """Patches that one step may encode. The first picture always may, however large."""

    limit: int
    spent: int = 0

    def allows(self, patches: int, ahead: int) -> bool:
        """Whether a picture of `patches` may be encoded after those spent and `ahead` more."""
        return self.spent + ahead == 0 or self.spent + ahead + patches <= self.limit


class Reach(NamedTuple):
    """A chunk may go to `end`; `missing`: pictures of the wanted chunk that are neither ready nor
    have pixels there, in order.
    """

    end: int
    missing: list[ImageKey]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a chunk may count on: embeddings that are `ready`, pixels that have `arrived`, and what
    may still be encoded now.
    """

    ready: Callable[[ImageKey], bool]
    arrived: Callable[[ImageKey], bool]
    patches: PatchBudget


def reach(content: Content, start: int, goal: int, sight: Sight) -> Reach:
    """How far a chunk from `start` towards `goal` may go: up to the first picture that is neither
    ready nor encodable in this step.
    """
    end = goal
    missing: list[ImageKey] = []
    encoding: dict[ImageKey, int] = {}
    for span in overlapping(content.spans, start, goal):
        image = content.images[span.image]
        if image.key in encoding or sight.ready(image.key):
            continue
        if not sight.arrived(image.key):
            if image.key not in missing:
                missing.append(image.key)
        elif end == goal and sight.patches.allows(image.num_patches, sum(encoding.values())):
            encoding[image.key] = image.num_patches
            continue
        end = min(end, max(start, span.start))
    return Reach(end, missing)


def splices(content: Content, start: int, end: int, row: int) -> list[Splice]:
    """Pictures in tokens `[start, end)`, whose first token is batch row `row`."""
    return [
        Splice(row + position, length, key, offset)
        for position, length, key, offset in content.pictures(start, end)
    ]
