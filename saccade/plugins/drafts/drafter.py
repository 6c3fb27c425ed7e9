"""Proposes draft tokens for a sequence, as many as are worth their cost in the step.

Proposals depend on the texts that an answer may repeat, on how many draft tokens were accepted, and
on the measured cost of one more row in a batch. A wrong draft token costs a row, but does not
change the answer: each token is sampled as it would be without drafts (`speculative.py`).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from saccade.core.metrics import Metrics
from saccade.core.plan import HeadDrafts, Plan
from saccade.core.types import DraftSource, ImageKey, Request
from saccade.sched.sequence import Sequence

Ids = npt.NDArray[np.int32]

MIN_MATCH = 3
"""Minimum number of latest tokens that must match the tokens before an earlier position, so that
the tokens after it are used as drafts.
"""
MAX_MATCH = 8
"""Maximum number of latest tokens that are compared. Of the positions with the longest match, the
latest one with enough tokens after it is used.
"""
LEAD = MAX_MATCH
"""Number of the prompt's last tokens that are stored before an answer, so that its first token can
be drafted, too.
"""
IMAGES = 4
"""The number of a request's images whose earlier answers are searched, the latest first."""
ANSWER_TOKENS = 4096
"""Maximum stored tokens of one answer."""
IMAGE_TOKENS = 16_384
"""Maximum stored tokens of all answers about one image. The oldest are dropped first."""
KEPT_TOKENS = 1 << 20
"""Maximum stored tokens in total, which take 4 MiB."""
END = -1
"""Separates stored answers. It is not a token ID."""


HEAD_TOKENS = 3
"""Maximum draft tokens per step from an MTP head, which computes each one from the previous one."""
TRIAL = 16
"""If the drafts of an MTP head are not worth their cost, one is requested once per this many
tokens.
"""
MARGIN = 1.1
"""The minimum predicted speedup. A sequence with draft tokens has to wait for their result, and
each of its plans has only one step. If rows cost as assumed, a single accepted token does not reach
it.
"""
BUSY_ROWS = 4
"""Maximum rows in a batch for drafting. In larger batches, drafts would speed up some sequences and
delay others, and split the batch into steps with fewer rows each.
"""
FIRST_RATE = 0.7
"""Assumed acceptance rate while no draft token has been sampled."""
MEMORY = 0.15
"""Minimum weight of one draft token's outcome in a sequence's acceptance rate. The rate starts as
the mean of the first few outcomes, so a sequence whose first draft token is rejected stops
drafting.
"""
DEFAULT_MEMORY = 0.03
"""Minimum weight of one draft token's outcome in the acceptance rate over all sequences, with which
a new sequence starts.
"""
ROW_COST = 0.06
"""The assumed cost of one more row, relative to a step with one row. Measured with 8-bit weights: 8
rows take 1.28 to 1.5 times as long as one.
"""
MIN_COST, MAX_COST = 0.005, 1.0
WEIGHT = 0.02
"""Minimum weight of the latest step in the fit. It is reached after fifty steps."""
SPREAD = 1.0
"""The variance of the number of rows at which measurements and `ROW_COST` have equal weights."""
OUTLIER = 3.0
"""The duration of a step is clipped to this multiple of the mean, because outliers have other
causes than the number of rows.
"""


class Untried(NamedTuple):
    """Draft tokens that were too unlikely to be tried, for positions from `place` on. They are
    compared with the tokens that are sampled there, to update the acceptance rate.
    """

    place: int
    tokens: list[int]
    source: DraftSource


@dataclass(slots=True)
class Speculation:
    """The state of drafting for one run of a sequence."""

    # the draft tokens in flight
    draft_tokens: list[int] = field(default_factory=list)
    # the latest token was, or followed, a draft token, so it must be sent to the worker
    sends_newest: bool = False
    lines: list[int] = field(default_factory=list)  # slots for the states between draft tokens
    masks: list[bytes] = field(default_factory=list)  # masks of rows in the plan, not yet requested
    # the number of draft tokens with a mask after them, or None without a grammar
    foreseen: int | None = None
    # their acceptance
    source: DraftSource = "text"
    outcomes: int = 0  # accepted and rejected draft tokens so far, also untried ones
    rate: float = 0.0  # the acceptance rate. It is unknown before the first outcome.
    untried: Untried | None = None  # nothing is drafted until they have been compared
    # the data that they are drafted from
    length: int = 0  # the number of valid tokens in `tokens`
    # a copy of the sequence's tokens, with spare capacity
    tokens: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    # texts that the answer may repeat, each after the end of the prompt; None before the first use
    expected: list[tuple[DraftSource, Ids]] | None = None
    head: HeadDrafts | None = None  # the latest draft tokens of the MTP head

    def known(self, tokens: Tokens[int]) -> Ids:
        """Return all tokens of the sequence as an array. Each call appends the new tokens."""
        if len(tokens) > len(self.tokens):
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        if self.length < len(tokens):
            self.tokens[self.length : len(tokens)] = tokens[self.length :]
            self.length = len(tokens)
        return self.tokens[: self.length]


class Drafter:
    """Proposes draft tokens for all sequences of a scheduler."""

    def __init__(self, most: int, *, head: bool = False) -> None:
        self.most = most  # maximum draft tokens per step and sequence
        self.head = head  # whether the model has an MTP head
        self.costs = StepCosts()
        self.proposed: Counter[DraftSource] = Counter()
        self.accepted: Counter[DraftSource] = Counter()
        self._usual: dict[DraftSource, float] = dict.fromkeys(get_args(DraftSource), FIRST_RATE)
        self._answers: OrderedDict[ImageKey, Ids] = OrderedDict()  # the latest answer is last
        self._kept = 0

    def allows(self, request: Request) -> bool:
        """Return True if draft tokens do not change the request's sampled tokens.

        With an adapter they may, because its results depend on neighboring rows.
        """
        return request.reading is None and not request.adapter.number

    def _eligible(self, request: Request, rows: int) -> bool:
        return rows <= BUSY_ROWS and self.allows(request)

    def propose(
        self, sequence: Sequence, speculation: Speculation, budget: int, rows: int
    ) -> list[int]:
        """Return up to `budget` draft tokens to follow the first token of the next row. That token
        may still be unknown.

        rows: the number of rows in the step without draft tokens.
        """
        grammar_state = sequence.grammar_state
        if (
            budget <= 0
            or not self._eligible(sequence.request, rows)
            or (grammar_state and not grammar_state.foresees)
            or not self._compare(sequence, speculation)
        ):
            return []
        ahead = sequence.length - len(sequence.tokens)
        most = min(self.most, budget)
        found = self._find(sequence, speculation, ahead + most)
        if grammar_state is not None and not ahead:
            found = found[: grammar_state.count_allowed(found)]
        if len(found) <= ahead:
            return []
        count = self._worthwhile(speculation, most, rows)
        if not count:
            speculation.untried = Untried(len(sequence.tokens), found[:most], speculation.source)
        return found[ahead : ahead + count]

    def count_for_head(self, sequence: Sequence, speculation: Speculation, rows: int) -> int:
        """Return how many draft tokens to request from the MTP head, to follow the token that the
        next row samples.

        The next plan waits for them.
        """
        if not self.head or not self._eligible(sequence.request, rows):
            return 0
        rate = self._rate(speculation, "head")
        count = worthwhile(rate, min(self.most, HEAD_TOKENS), rows, self.costs.row)
        return count or int(sequence.output_length % TRIAL == 0)

    def _worthwhile(self, speculation: Speculation, most: int, rows: int) -> int:
        rate = self._rate(speculation, speculation.source)
        return worthwhile(rate, most, rows, self.costs.row)

    def settle(self, speculation: Speculation, accepted: int) -> None:
        """Record the result of the draft tokens in flight: `accepted` of them were accepted."""
        source, proposed = speculation.source, len(speculation.draft_tokens)
        self.proposed[source] += proposed
        self.accepted[source] += accepted
        self._judge(speculation, source, accepted, proposed)
        speculation.draft_tokens = []

    def _compare(self, sequence: Sequence, speculation: Speculation) -> bool:
        """Compare untried draft tokens with the sequence's tokens. Return False if some of these
        are not known yet.
        """
        if speculation.untried is None:
            return True
        place, tokens, source = speculation.untried
        sampled = sequence.tokens[place : place + len(tokens)]
        if len(sampled) < len(tokens):
            return False
        wrong = (i for i, pair in enumerate(zip(tokens, sampled)) if pair[0] != pair[1])
        self._judge(speculation, source, next(wrong, len(tokens)), len(tokens))
        speculation.untried = None
        return True

    def _rate(self, speculation: Speculation, source: DraftSource) -> float:
        return speculation.rate if speculation.outcomes else self._usual[source]

    def _judge(
        self, speculation: Speculation, source: DraftSource, accepted: int, proposed: int
    ) -> None:
        for outcome in [1.0] * accepted + [0.0] * (accepted < proposed):
            speculation.outcomes += 1
            weight = max(MEMORY, 1.0 / speculation.outcomes)
            speculation.rate += weight * (outcome - speculation.rate)
            self._usual[source] += DEFAULT_MEMORY * (outcome - self._usual[source])

    def _find(self, sequence: Sequence, speculation: Speculation, count: int) -> list[int]:
        """Return up to `count` tokens that followed an earlier occurrence of the sequence's latest
        tokens.
        """
        known = speculation.known(sequence.tokens)
        newest = known[-MAX_MATCH:]
        images = [image.key for image in reversed(sequence.request.images)][:IMAGES]
        answers: list[tuple[DraftSource, Ids]] = [
            ("image", self._answers[key]) for key in dict.fromkeys(images) if key in self._answers
        ]
        if speculation.expected is None:
            speculation.expected = _expected(sequence.request)
        best, found = MIN_MATCH - 1, list[int]()
        for source, tokens in (*speculation.expected, *answers, ("text", known)):
            matched, place = last_match(tokens, newest, count)
            if matched > best:
                best, speculation.source = matched, source
                found = tokens[place : place + count].tolist()
        if best < MIN_MATCH and (draft_tokens := speculation.head) is not None:
            since = known[draft_tokens.place :].tolist()
            if draft_tokens.place <= len(known) and (*since,) == draft_tokens.tokens[: len(since)]:
                speculation.source = "head"
                return [*draft_tokens.tokens[len(since) :]]
        return found[: found.index(END)] if END in found else found

    def keep_answer(self, sequence: Sequence) -> None:
        """Store a finished answer, since later answers may repeat it."""
        if not sequence.request.images or not sequence.output_length:
            return
        start = sequence.prompt_length
        answer = sequence.tokens[max(0, start - LEAD) : start + ANSWER_TOKENS]
        mine = np.array([*answer, END], np.int32)
        for key in dict.fromkeys(image.key for image in sequence.request.images[-IMAGES:]):
            before = self._answers.pop(key, np.empty(0, np.int32))
            whole = np.concatenate((before, mine))[-IMAGE_TOKENS:]
            self._answers[key] = whole
            self._kept += len(whole) - len(before)
        while self._kept > KEPT_TOKENS:
            _, oldest = self._answers.popitem(last=False)
            self._kept -= len(oldest)

    def flush(self) -> None:
        """Drop all stored answers."""
        self._answers.clear()
        self._kept = 0

    def measure(self, metrics: Metrics) -> None:
        """Update the metrics of draft tokens."""
        for source in get_args(DraftSource):
            metrics.set("saccade_draft_tokens_total", self.proposed[source], source=source)
            metrics.set("saccade_accepted_tokens_total", self.accepted[source], source=source)


def _expected(request: Request) -> list[tuple[DraftSource, Ids]]:
    lead, caching = request.tokens[-LEAD:], request.caching
    texts: list[tuple[DraftSource, tuple[int, ...]]] = [
        ("prediction", caching.prediction),
        ("page", caching.page_text),
    ]
    return [(source, np.array([*lead, *text, END], np.int32)) for source, text in texts if text]


def last_match(tokens: Ids, newest: Ids, count: int) -> tuple[int, int]:
    """Find the longest suffix of `newest` [N] that occurs in `tokens` [L] before another token.

    Returns its length and the index of that token, or (0, 0) if there is no match. Of several
    occurrences, the last one with `count` tokens before its END is used, or else the one with the
    most. (An answer that repeats itself matches up to its end.)
    """
    places = np.flatnonzero((tokens[:-1] == newest[-1]) & (tokens[1:] != END)) + 1
    if not len(places):
        return 0, 0
    matched = 1
    while matched < len(newest):
        further = places[places > matched]
        further = further[tokens[further - matched - 1] == newest[-matched - 1]]
        if not len(further):
            break
        places, matched = further, matched + 1
    ends = np.append(np.flatnonzero(tokens == END), len(tokens))
    follow = ends[np.searchsorted(ends, places)] - places
    enough = places[follow >= count]
    return matched, int(enough[-1] if len(enough) else places[np.argmax(follow)])


def worthwhile(rate: float, most: int, rows: int, row_cost: float) -> int:
    """Return the number of draft tokens, up to `most`, with the best ratio of expected tokens to
    cost.

    Returns 0 if not even one is worth the cost of its row.

    rate: the probability that a draft token is accepted if all before it were.
    rows: the number of rows in the step without draft tokens.
    row_cost: as `StepCosts.row`.

    In a batch, a sequence with drafts waits while the others continue with the next plan, so the
    comparison is with two steps.
    """
    best, best_gain, more, step = 0, MARGIN, 0.0, 1.0 + row_cost * (rows - 1)
    waits = rows > 1
    for count in range(1, most + 1):
        more += rate**count
        cost = step + row_cost * count
        if waits:
            tokens, before = 2 * rows - 1 + more, 2 * rows
            cost, usual = cost + step - row_cost, 2 * step
        else:
            tokens, before, usual = 1 + more, 1, step
        gain = tokens / before / (cost / usual)
        if gain > best_gain:
            best, best_gain = count, gain
    return best


class StepCosts:
    """Fits the duration of steps as a linear function of their number of rows.

    The fit is a moving average, because the load of the machine and the lengths of sequences
    change.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = 0.0
        self._steps = 0
        self._rows = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0

    @property
    def row(self) -> float:
        """The cost of one more row, relative to a step with one row."""
        if not self._seconds:
            return ROW_COST
        one = self._seconds / (1.0 + ROW_COST * (self._rows - 1.0))
        each = self._covariance + SPREAD * ROW_COST * one
        each = max(0.0, each / (self._variance + SPREAD))
        one = max(self._seconds - each * (self._rows - 1.0), each)
        return min(max(each / one, MIN_COST), MAX_COST)

    def ended(self, plan: Plan, planned: float) -> None:
        """Record the end of a step, and its duration.

        planned: the time at which the step's plan was submitted.

        Steps run one after another: a step starts when the previous one ends, or when it is
        submitted.
        """
        now = self._clock()
        seconds, self._ended = now - max(self._ended, planned), now
        alone = not (plan.tower or plan.encode)
        if alone and plan.rows and all(row.length == 1 and row.sample for row in plan.rows):
            self.note(len(plan.rows), seconds)

    def note(self, rows: int, seconds: float) -> None:
        """Record that a step of `rows` rows with one token each took `seconds`."""
        if seconds <= 0.0:
            return
        if self._steps:
            seconds = min(seconds, OUTLIER * self._seconds)
        self._steps += 1
        weight = max(WEIGHT, 1.0 / self._steps)
        more, longer = rows - self._rows, seconds - self._seconds
        self._rows += weight * more
        self._seconds += weight * longer
        self._variance = (1.0 - weight) * (self._variance + weight * more * more)
        self._covariance = (1.0 - weight) * (self._covariance + weight * more * longer)
