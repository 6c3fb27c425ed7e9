"""Limits how much work on images and prompts a decoding step on an accelerator does.

The vision encoder has its own multiprocessors. Its budget grows until about one step in a hundred
takes more than twice as long as a step that only decodes. Prompt tokens share the multiprocessors
with decoding rows, so their number is limited to keep a step within a maximum time. Both budgets
follow from the measured times of earlier steps.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

from saccade.core.plan import Plan

MAX_PAUSE = 2.0
"""A step with an image or a prompt may take this many times as long as one that only decodes."""
SHRINK = 0.8
GROW = 1.002
"""A step that takes too long shrinks the encoder's budget, and any other step lets it grow. The
budget is stable if one step in 112 is too long: ln 1.002 / (ln 1.002 - ln 0.8).
"""
REMEMBERED = 64
"""Number of recent steps that only decode. Their median is the expected time of such a step."""
MIN_PART = 8
"""The encoder's budget stays above 1/MIN_PART of its initial value, because slightly slower
decoding is better than an image that never completes.
"""
REMEMBERED_PROMPTS = 8
"""Number of recent steps with a prompt. The slowest one counts, because tokens after a longer
prefix take longer.
"""


class PromptPace:
    """Adapts the number of prompt tokens per step, `tokens`, which is always one of `sizes`.

    It falls at once to the largest size that fits, but rises by at most one size per step, because
    the time of a small chunk is a poor estimate for a large one.
    """

    def __init__(self, sizes: tuple[int, ...], pause: float) -> None:
        """Start with the smallest size. `sizes` must be ascending.

        pause: the maximum time of a step, in seconds. If decoding takes more than half of this, the
            limit is `MAX_PAUSE` times the decoding time.
        """
        assert sizes and list(sizes) == sorted(sizes) and pause > 0
        self._sizes, self._pause = sizes, pause
        self._each: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)  # seconds per prompt token
        self.tokens = sizes[0]

    def ended(self, tokens: int, seconds: float, alone: float) -> None:
        """Record the time of a step with `tokens` prompt tokens, and update `tokens` of this
        object.

        seconds: the time that the step took.
        alone: the expected time of its decoding rows, in seconds.
        """
        room = max(self._pause, MAX_PAUSE * alone) - alone
        added = max(0.0, seconds - alone)
        if 2 * tokens < self.tokens and (added <= room or 2 * tokens < self._sizes[0]):
            return  # the short last chunk of a prompt has a high fixed cost per token
        self._each.append(added / tokens)
        slowest, place = max(self._each), self._sizes.index(self.tokens)
        reach = self._sizes[: place + 2]
        self.tokens = max((size for size in reach if size * slowest <= room), default=reach[0])


class StepPace:
    """Measures steps, and adapts how much other work a step that decodes may do.

    tower_budget: the vision encoder's budget per step, in patch-blocks (patches x blocks).
    prompts: adapts the number of prompt tokens per step, or None if they are not limited.
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
        """Seconds of recent steps that only decode, by bit length of the number of rows: 1, 2 to 3,
        4 to 7 ...
        """

    def ended(self, plan: Plan, planned: float, encoding: bool) -> None:
        """Record the end of a step whose plan was made at the time `planned`.

        Steps run one after another. A step starts when the one before it ends, or when it is
        planned if that is later.

        encoding: True if an image is being encoded.
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
                # Under constant prefill no step with this many rows only decodes. Then use the time
                # of fewer rows, which is at most as long.
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
