"""How much of images and prompts a step does beside decoding rows, on an accelerator.

The tower has its own processors, so its part is as much as keeps at most one pause in a hundred
above two steps. A prompt's tokens share the rows' processors, so they are as many as keep a step
within a time. Owns the measured steps and the resulting budgets.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

from saccade.core.plan import Plan

MAX_PAUSE = 2.0
"""Steps of the same rows without an image or a prompt beside them."""
SHRINK = 0.8
GROW = 1.002
"""A pause that is too long shrinks the tower's budget, any other lets it grow. It stands still
where one pause in 112 is too long: ln 1.002 / (ln 1.002 - ln 0.8)."""
REMEMBERED = 64
"""Steps without an image or a prompt, of which the median is what such a step takes."""
MIN_PART = 8
"""The tower's budget stays above one part in so many of what it began with: rows that decode a
little late are better than an image that never ends."""
REMEMBERED_PROMPTS = 8
"""Steps with a prompt, of which the slowest counts: a token behind a longer prefix takes longer."""


class PromptPace:
    """The prompts' pace. `tokens`: of prompts per step, one of `sizes`.

    It falls to a size that fits at once, and rises by one size a step: a small chunk says little of
    a large one.
    """

    def __init__(self, sizes: tuple[int, ...], pause: float) -> None:
        """Begin with the least of the sizes, which ascend.

        pause: seconds of a step. Rows that alone take more than half of it have `MAX_PAUSE`.
        """
        assert sizes and list(sizes) == sorted(sizes) and pause > 0
        self._sizes, self._pause = sizes, pause
        self._each: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)  # seconds of a prompt's token
        self.tokens = sizes[0]

    def ended(self, tokens: int, seconds: float, alone: float) -> None:
        """Record a step with so many tokens of prompts. alone: seconds of its decoding rows."""
        room = max(self._pause, MAX_PAUSE * alone) - alone
        added = max(0.0, seconds - alone)
        if 2 * tokens < self.tokens and (added <= room or 2 * tokens < self._sizes[0]):
            return  # a short rest of a prompt takes as long as many more tokens
        self._each.append(added / tokens)
        slowest, place = max(self._each), self._sizes.index(self.tokens)
        reach = self._sizes[: place + 2]
        self.tokens = max((size for size in reach if size * slowest <= room), default=reach[0])


class StepPace:
    """The pace of steps with decoding rows.

    `tower_budget`: patch-blocks per step, first `budget`, at most `most`. `prompts`: the prompts'
    pace, or None without one.
    """

    def __init__(
        self,
        budget: int,
        most: int,
        prompts: PromptPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tower_budget = budget
        self.prompts = prompts
        self._exact = float(budget)
        self._least, self._most = max(1.0, budget / MIN_PART), float(max(budget, most))
        self._clock = clock
        self._ended = 0.0
        self._alone: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        """Seconds of late steps of 1, 2 to 3, 4 to 7 ... rows with nothing beside them."""

    def ended(self, plan: Plan, planned: float, encoding: bool) -> None:
        """Record that a step has ended whose plan was handed out at `planned`.

        encoding: an image is being encoded. Steps run one after another, so a step begins when the
        step before ends, or when handed out.
        """
        now = self._clock()
        seconds, self._ended = now - max(self._ended, planned), now
        prompt = [row.length for row in plan.rows if row.length > 1 or not row.sample]
        decoding = len(plan.rows) - len(prompt)
        if not decoding:
            return
        alone = self._alone[decoding.bit_length()]
        if prompt:
            if self.prompts is not None:
                # Fewer rows take no longer. Where prompts never end, no step of so many is alone.
                sizes = range(decoding.bit_length(), 0, -1)
                known = next((self._alone[each] for each in sizes if self._alone.get(each)), None)
                self.prompts.ended(sum(prompt), seconds, median(known) if known else 0.0)
        elif plan.tower > 0 and alone:
            self._adapt(seconds > MAX_PAUSE * median(alone))
        elif not (plan.tower or encoding):
            alone.append(seconds)

    def _adapt(self, late: bool) -> None:
        changed = self._exact * (SHRINK if late else GROW)
        self._exact = min(max(changed, self._least), self._most)
        self.tower_budget = round(self._exact)
