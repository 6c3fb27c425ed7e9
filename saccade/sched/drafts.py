"""Drafts: guesses of a sequence's next tokens, and the number worth a row of the step.

Owns the kept answers about images, and the record of guesses. A wrong guess costs a row and changes
nothing: each token is drawn as without guesses (`scheduler.py`). Knows nothing of plans, pages or
the clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import get_args

import numpy as np

from saccade.core.plan import HeadGuesses
from saccade.core.types import ImageKey, Request
from saccade.sched.sequence import Run, Sequence
from saccade.sched.speculation import (
    FIRST_RATE,
    USUAL_MEMORY,
    Ids,
    Source,
    Speculation,
    Untried,
    judged,
    worthwhile,
)
from saccade.sched.step_costs import StepCosts

LEAST_MATCH = 3
"""Newest tokens of a sequence that a place must have before it, to be guessed from."""
MOST_MATCH = 8
"""How many are compared: of the places that match furthest, the newest is taken that has enough
tokens after it.
"""
LEAD = MOST_MATCH
"""Prompt tokens that stand before an answer, so that its first token can be guessed too."""
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
"""Guesses of the model's head for a step: each further one is made of the one before."""
TRIAL = 16
"""Answer tokens from one question to a head whose guesses are not worth a row to the next."""


class Drafter:
    """Guesses for all sequences of a scheduler: at most `most` tokens a step for each; 0: none.
    head: the model has a head that drafts.
    """

    def __init__(self, most: int, *, head: bool = False) -> None:
        self.most = most
        self.head = head
        self.costs = StepCosts()
        self.guessed: Counter[Source] = Counter()
        self.right: Counter[Source] = Counter()
        self._usual: dict[Source, float] = dict.fromkeys(get_args(Source), FIRST_RATE)
        self._answers: OrderedDict[ImageKey, Ids] = OrderedDict()  # the newest answer last
        self._kept = 0

    def allows(self, request: Request) -> bool:
        """True if each token is drawn as without guesses: no adapter, whose bits depend on
        neighbouring rows, adds to the row.
        """
        return bool(self.most) and request.reading is None and not request.adapter.number

    def propose(self, sequence: Sequence, run: Run, room: int, rows: int) -> list[int]:
        """Up to `room` guesses of the tokens after the next row's first, perhaps not yet known.
        rows: the step's without guesses.
        """
        guide = sequence.guide
        if room <= 0 or not self.allows(sequence.request) or (guide and not guide.foresees):
            return []
        speculation, ahead = run.speculation, sequence.length - len(sequence.tokens)
        self._compare(sequence, speculation)
        most = min(self.most, room)
        found = self._find(sequence, speculation, ahead + most)[ahead:]
        if guide is not None and not ahead:
            found = found[: guide.count_allowed(found)]
        if not found:
            return []
        count = self._worthwhile(speculation, most, rows)
        if not count:
            untried = Untried(sequence.length, found[0], speculation.source)
            speculation.untried.append(untried)
        return found[:count]

    def ask(self, sequence: Sequence, run: Run, rows: int) -> int:
        """The number of guesses to ask the model's head for, after the token that the run's next
        row draws. The next plan waits for them.
        """
        if not self.head or not self.allows(sequence.request):
            return 0
        rate = self._rate(run.speculation, "head")
        count = worthwhile(rate, min(self.most, HEAD_TOKENS), rows, self.costs.row)
        count = count or int(sequence.output_length % TRIAL == 0)
        run.speculation.asked = count > 0
        return count

    def told(self, run: Run, guesses: HeadGuesses) -> None:
        """The head has guessed."""
        run.speculation.head, run.speculation.asked = guesses, False

    def _worthwhile(self, speculation: Speculation, most: int, rows: int) -> int:
        rate = self._rate(speculation, speculation.source)
        return worthwhile(rate, most, rows, self.costs.row)

    def settle(self, run: Run, right: int) -> None:
        """The guesses in flight have been drawn: so many right in a row."""
        speculation = run.speculation
        self.guessed[speculation.source] += speculation.rows
        self.right[speculation.source] += right
        self._judge(speculation, speculation.source, right, speculation.rows)
        speculation.rows = 0

    def _compare(self, sequence: Sequence, speculation: Speculation) -> None:
        """Judge the guesses not worth a row, once their tokens are known."""
        untried = speculation.untried
        while untried and untried[0].place < len(sequence.tokens):
            place, token, source = untried.popleft()
            self._judge(speculation, source, int(sequence.tokens[place] == token), 1)

    def _rate(self, speculation: Speculation, source: Source) -> float:
        return self._usual[source] if speculation.rate is None else speculation.rate

    def _judge(self, speculation: Speculation, source: Source, right: int, guessed: int) -> None:
        speculation.rate = judged(self._rate(speculation, source), right, guessed)
        self._usual[source] = judged(self._usual[source], right, guessed, USUAL_MEMORY)

    def _find(self, sequence: Sequence, speculation: Speculation, count: int) -> list[int]:
        """Up to `count` tokens that followed an earlier place of the newest tokens."""
        known = speculation.known(sequence.tokens)
        newest = known[-MOST_MATCH:]
        images = [image.key for image in reversed(sequence.request.images)][:IMAGES]
        places: list[tuple[Source, Ids]] = [
            ("image", self._answers[key]) for key in dict.fromkeys(images) if key in self._answers
        ]
        if sequence.request.caching.prediction:
            places.insert(0, ("prediction", _predicted(sequence.request, speculation)))
        best, found = LEAST_MATCH - 1, list[int]()
        for source, tokens in (*places, ("text", known)):
            matched, place = last_match(tokens, newest, count)
            if matched > best:
                best, speculation.source = matched, source
                found = tokens[place : place + count].tolist()
        if best < LEAST_MATCH and (guesses := speculation.head) is not None:
            since = known[guesses.place :].tolist()
            if guesses.place <= len(known) and (*since,) == guesses.tokens[: len(since)]:
                speculation.source = "head"
                return [*guesses.tokens[len(since) :]]
        return found[: found.index(END)] if END in found else found

    def keep(self, sequence: Sequence) -> None:
        """An answer has ended, and may be given again."""
        if not self.most or not sequence.request.images or not sequence.output_length:
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


def _predicted(request: Request, speculation: Speculation) -> Ids:
    if not len(speculation.prediction):
        lead = request.tokens[-LEAD:]
        answer = [*lead, *request.caching.prediction, END]
        speculation.prediction = np.array(answer, np.int32)
    return speculation.prediction


def last_match(tokens: Ids, newest: Ids, count: int) -> tuple[int, int]:
    """The length of the longest end of `newest` [N] found in `tokens` [L] before a further token;
    and the place of the further token: the last such place with `count` tokens to its END, or the
    one with most (an answer that repeats itself matches up to its end). (0, 0): none.
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
