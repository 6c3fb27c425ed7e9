"""How much of an image's encoding a step does beside decoding rows, for a tower with own
processors.

It is as much as keeps at most one pause in a hundred above two steps. Owns the measured pauses and
the resulting budget. Knows nothing of images, nor of a patch-block's time: a faster tower, or
smaller steps, show in the pauses.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

from saccade.core.plan import Plan

LONGEST_PAUSE = 2.0
"""Steps of the same rows without an image beside them."""
SHRINK = 0.8
GROW = 1.002
"""A pause that is too long shrinks the budget, any other lets it grow. It stands still where one
pause in 112 is too long: ln 1.002 / (ln 1.002 - ln 0.8)."""
REMEMBERED = 64
"""Steps without an image, of which the median is what such a step takes."""
LEAST_PART = 8
"""The budget stays above one part in so many of what it began with: rows that decode a little late
are better than an image that never ends."""


class TowerPace:
    """The tower's pace. `tower_budget`: patch-blocks per step, first `budget`, at most `most`."""

    def __init__(self, budget: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.tower_budget = budget
        self._exact = float(budget)
        self._least, self._most = max(1.0, budget / LEAST_PART), float(max(budget, most))
        self._clock = clock
        self._ended = 0.0
        self._alone: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        """Seconds of late steps of 1, 2 to 3, 4 to 7 ... rows without an image beside them."""

    def ended(self, plan: Plan, planned: float, encoding: bool) -> None:
        """Record that a step has ended whose plan was handed out at `planned`.

        encoding: an image is being encoded. Steps run one after another, so a step begins when the
        step before ends, or when handed out.
        """
        now = self._clock()
        seconds, self._ended = now - max(self._ended, planned), now
        if not plan.rows or any(row.length > 1 or not row.sample for row in plan.rows):
            return  # prompts take their own time
        alone = self._alone[len(plan.rows).bit_length()]
        if plan.tower > 0 and alone:
            self._adapt(seconds > LONGEST_PAUSE * median(alone))
        elif not (plan.tower or encoding):
            alone.append(seconds)

    def _adapt(self, late: bool) -> None:
        changed = self._exact * (SHRINK if late else GROW)
        self._exact = min(max(changed, self._least), self._most)
        self.tower_budget = round(self._exact)
