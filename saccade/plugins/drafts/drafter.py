"""Draft tokens: proposals for a sequence's next tokens, and how many are worth a row in the step.

Owns the kept answers about images, the record of draft tokens, and the measured cost of one more
row. A wrong draft token costs a row and leaves the answer as it is: each token is drawn as without
drafts (`speculative.py`).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
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
"""Newest tokens of a sequence that a place must have before it, to be drafted from."""
MAX_MATCH = 8
"""How many are compared: of the places that match furthest, the newest is taken that has enough
tokens after it.
"""
LEAD = MAX_MATCH
"""Prompt tokens that stand before an answer, so that its first token can be drafted too."""
IMAGES = 4
"""Images of a request whose earlier answers are searched, the newest first."""
ANSWER_TOKENS = 4096
"""Of one answer, kept."""
IMAGE_TOKENS = 16_384
"""Of all answers about one image, kept; older ones go."""
KEPT_TOKENS = 1 << 20
"""Of all answers, kept: 4 MiB."""
END = -1
"""Between two answers: no token."""


HEAD_TOKENS = 3
"""Draft tokens of the model's MTP head for a step: each further one is made of the one before."""
TRIAL = 16
"""Answer tokens from one question to a head whose drafts are not worth a row to the next."""
MARGIN = 1.05
"""A draft waits for its result before the sequence goes on; so it must promise so much more."""
BUSY_ROWS = 4
"""Beside more rows nothing is drafted: it would hasten some sequences and delay the others, and the
batch would fall apart into steps of a part of its rows each.
"""
FIRST_RATE = 0.7
"""Before any draft token of the scheduler's sequences was drawn."""
MEMORY = 0.15
"""Weight of a draft token's outcome in the share of accepted ones."""
DEFAULT_MEMORY = 0.03
"""The same in the share of all sequences, with which a new one begins."""
ROW_COST = 0.06
"""Of one more row, in parts of what a step of one row takes, where nothing else is measured: 8 rows
in 8 bits were measured to take 1.28 to 1.5 times as long as one.
"""
MIN_COST, MAX_COST = 0.005, 1.0
WEIGHT = 0.02
"""Of the newest step, once there have been fifty."""
SPREAD = 1.0
"""Variance of the number of rows at which what was measured counts as much as `ROW_COST`."""
OUTLIER = 3.0
"""A step that takes so many times the usual was held up by something else, and counts as that."""


class Untried(NamedTuple):
    """A draft token too unlikely for a row, whose place is drawn anyway: `token` at `place`."""

    place: int
    token: int
    source: DraftSource


@dataclass(slots=True)
class Speculation:
    """The draft tokens of one run."""

    # in flight, and behind it
    draft_tokens: list[int] = field(default_factory=list)  # in flight
    # the newest token came as a draft token or after one, and goes to the worker
    sends_newest: bool = False
    lines: list[int] = field(default_factory=list)  # for states between draft tokens
    masks: list[bytes] = field(default_factory=list)  # for rows in flight, still to be taken
    # how many draft tokens in flight have masks behind them, or None without a grammar
    foreseen: int | None = None
    # how good they were
    source: DraftSource = "text"
    rate: float | None = None  # the share of accepted tokens, or None before the first
    untried: deque[Untried] = field(default_factory=deque)  # draft tokens that are only compared
    # what they come from
    length: int = 0
    # known so far, as far as looked at
    tokens: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    # the client's, behind the prompt's end, and empty before the first look
    prediction: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    head: HeadDrafts | None = None  # the newest draft tokens from the MTP head

    def known(self, tokens: Tokens[int]) -> Ids:
        """Return all tokens of the sequence as an array."""
        if len(tokens) > len(self.tokens):
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        if self.length < len(tokens):
            self.tokens[self.length : len(tokens)] = tokens[self.length :]
            self.length = len(tokens)
        return self.tokens[: self.length]


class Drafter:
    """Drafts for all sequences of a scheduler."""

    def __init__(self, most: int, *, head: bool = False) -> None:
        self.most = most  # draft tokens per step for each sequence
        self.head = head  # the model has an MTP head
        self.costs = StepCosts()
        self.proposed: Counter[DraftSource] = Counter()
        self.accepted: Counter[DraftSource] = Counter()
        self._usual: dict[DraftSource, float] = dict.fromkeys(get_args(DraftSource), FIRST_RATE)
        self._answers: OrderedDict[ImageKey, Ids] = OrderedDict()  # the newest answer last
        self._kept = 0

    def allows(self, request: Request) -> bool:
        """Return True if each token is drawn as without draft tokens.

        An adapter rules that out, because its bits depend on neighbouring rows.
        """
        return request.reading is None and not request.adapter.number

    def propose(
        self, sequence: Sequence, speculation: Speculation, budget: int, rows: int
    ) -> list[int]:
        """Return up to `budget` draft tokens to follow the next row's first, perhaps unknown,
        token.

        rows: the step's rows without draft tokens.
        """
        grammar_state = sequence.grammar_state
        if (
            budget <= 0
            or not self.allows(sequence.request)
            or (grammar_state and not grammar_state.foresees)
        ):
            return []
        ahead = sequence.length - len(sequence.tokens)
        self._compare(sequence, speculation)
        most = min(self.most, budget)
        found = self._find(sequence, speculation, ahead + most)[ahead:]
        if grammar_state is not None and not ahead:
            found = found[: grammar_state.count_allowed(found)]
        if not found:
            return []
        count = self._worthwhile(speculation, most, rows)
        if not count:
            untried = Untried(sequence.length, found[0], speculation.source)
            speculation.untried.append(untried)
        return found[:count]

    def count_for_head(self, sequence: Sequence, speculation: Speculation, rows: int) -> int:
        """Return how many draft tokens to ask the MTP head for, after the token that the next row
        draws.

        The next plan waits for them.
        """
        if not self.head or not self.allows(sequence.request):
            return 0
        rate = self._rate(speculation, "head")
        count = worthwhile(rate, min(self.most, HEAD_TOKENS), rows, self.costs.row)
        return count or int(sequence.output_length % TRIAL == 0)

    def _worthwhile(self, speculation: Speculation, most: int, rows: int) -> int:
        rate = self._rate(speculation, speculation.source)
        return worthwhile(rate, most, rows, self.costs.row)

    def settle(self, speculation: Speculation, accepted: int) -> None:
        """Record that the draft tokens in flight were drawn, with `accepted` of them accepted."""
        source, proposed = speculation.source, len(speculation.draft_tokens)
        self.proposed[source] += proposed
        self.accepted[source] += accepted
        self._judge(speculation, source, accepted, proposed)
        speculation.draft_tokens = []

    def _compare(self, sequence: Sequence, speculation: Speculation) -> None:
        """Judge the untried draft tokens, once their tokens are known."""
        untried = speculation.untried
        while untried and untried[0].place < len(sequence.tokens):
            place, token, source = untried.popleft()
            self._judge(speculation, source, int(sequence.tokens[place] == token), 1)

    def _rate(self, speculation: Speculation, source: DraftSource) -> float:
        return self._usual[source] if speculation.rate is None else speculation.rate

    def _judge(
        self, speculation: Speculation, source: DraftSource, accepted: int, proposed: int
    ) -> None:
        speculation.rate = judged(self._rate(speculation, source), accepted, proposed)
        self._usual[source] = judged(self._usual[source], accepted, proposed, DEFAULT_MEMORY)

    def _find(self, sequence: Sequence, speculation: Speculation, count: int) -> list[int]:
        """Return up to `count` tokens that followed an earlier place of the newest tokens."""
        known = speculation.known(sequence.tokens)
        newest = known[-MAX_MATCH:]
        images = [image.key for image in reversed(sequence.request.images)][:IMAGES]
        places: list[tuple[DraftSource, Ids]] = [
            ("image", self._answers[key]) for key in dict.fromkeys(images) if key in self._answers
        ]
        if sequence.request.caching.prediction:
            places.insert(0, ("prediction", _predicted(sequence.request, speculation)))
        best, found = MIN_MATCH - 1, list[int]()
        for source, tokens in (*places, ("text", known)):
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
        """Keep an ended answer, which may be given again."""
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
        """Forget earlier answers."""
        self._answers.clear()
        self._kept = 0

    def measure(self, metrics: Metrics) -> None:
        """Copy the record of draft tokens into the metrics that users see."""
        for source in get_args(DraftSource):
            metrics.set("saccade_draft_tokens_total", self.proposed[source], source=source)
            metrics.set("saccade_accepted_tokens_total", self.accepted[source], source=source)


def _predicted(request: Request, speculation: Speculation) -> Ids:
    if not len(speculation.prediction):
        lead = request.tokens[-LEAD:]
        answer = [*lead, *request.caching.prediction, END]
        speculation.prediction = np.array(answer, np.int32)
    return speculation.prediction


def last_match(tokens: Ids, newest: Ids, count: int) -> tuple[int, int]:
    """Find the longest end of `newest` [N] in `tokens` [L] before a further token.

    Returns its length and the further token's place, or (0, 0) without a match. The place is the
    last with `count` tokens to its END, or the one with most. (An answer that repeats itself
    matches up to its end.)
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


def judged(rate: float, accepted: int, proposed: int, memory: float = MEMORY) -> float:
    """Return the rate after `accepted` tokens out of `proposed` in flight."""
    for outcome in [1.0] * accepted + [0.0] * (accepted < proposed):
        rate += memory * (outcome - rate)
    return rate


def worthwhile(rate: float, most: int, rows: int, row_cost: float) -> int:
    """Return how many draft tokens, up to `most`, promise most tokens for their cost.

    Returns 0 if even one is not worth a row. rows: the other rows in the step. rate: the chance
    that a draft token is accepted after accepted ones. row_cost: as `StepCosts.row`.

    Beside other rows, a drafting sequence waits while the rest continue with the next plan. So the
    comparison is with two steps.
    """
    if rows > BUSY_ROWS:
        return 0
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
    """The fitted cost of a step by its rows.

    Old steps are forgotten, as the machine's load changes and sequences grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = 0.0
        self._steps = 0
        self._rows = self._seconds = 0.0  # the means
        self._variance = self._covariance = 0.0

    @property
    def row(self) -> float:
        """Compute the cost of one more row, relative to a step with one row."""
        if not self._seconds:
            return ROW_COST
        one = self._seconds / (1.0 + ROW_COST * (self._rows - 1.0))
        each = self._covariance + SPREAD * ROW_COST * one
        each = max(0.0, each / (self._variance + SPREAD))
        one = max(self._seconds - each * (self._rows - 1.0), each)
        return min(max(each / one, MIN_COST), MAX_COST)

    def ended(self, plan: Plan, planned: float) -> None:
        """Record that a step has ended whose plan was handed out at `planned`.

        Steps run one after another, so a step begins when the step before ends, or when handed out.
        """
        now = self._clock()
        seconds, self._ended = now - max(self._ended, planned), now
        alone = not (plan.tower or plan.encode)
        if alone and plan.rows and all(row.length == 1 and row.sample for row in plan.rows):
            self.note(len(plan.rows), seconds)

    def note(self, rows: int, seconds: float) -> None:
        """Record a step with `rows` rows, each of one token, that took `seconds`."""
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
