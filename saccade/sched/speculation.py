"""The record of a sequence's guesses, and the number of guesses worth their rows.

Owns the state of one run's guesses. Knows nothing of the guesses' origin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.core.plan import HeadGuesses
from saccade.core.types import GuessSource

Ids = npt.NDArray[np.int32]
Source = GuessSource

MARGIN = 1.05
"""A draft waits for its result before the sequence goes on; so it must promise so much more."""
BUSY_ROWS = 4
"""Beside more rows nothing is guessed: it would hasten some sequences and delay the others, and the
batch would fall apart into steps of a part of its rows each.
"""
FIRST_RATE = 0.7
"""Before any guess of the scheduler's sequences was drawn."""
MEMORY = 0.15
"""Weight of a guess's outcome in the share of right ones."""
USUAL_MEMORY = 0.03
"""The same in the share of all sequences, with which a new one begins."""


class Untried(NamedTuple):
    """A guess not worth a row, whose token is drawn anyway: `token` at `place`."""

    place: int
    token: int
    source: Source


@dataclass(slots=True)
class Speculation:
    """The guesses of one run. rows: of guesses in flight. told: the newest token came as a guess or
    after one, and goes to the worker. lines: as `DraftStates` says. foreseen: guesses in flight
    with masks behind them; None: any, there is no grammar. rate: the share of right guesses; None:
    none was made. untried: guesses only compared. tokens: known so far, as far as looked at.
    prediction: the client's, behind the prompt's end; empty before the first look. head: the newest
    guesses of the model's head; asked: some are on their way, and worth a wait.
    """

    # in flight, and behind it
    rows: int = 0
    told: bool = False
    lines: list[int] = field(default_factory=list)
    foreseen: int | None = None
    # how good they were
    source: Source = "text"
    rate: float | None = None
    untried: deque[Untried] = field(default_factory=deque)
    # what they come from
    length: int = 0
    tokens: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    prediction: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    head: HeadGuesses | None = None
    asked: bool = False

    @property
    def waits(self) -> bool:
        """True if the sequence goes on only with the result of the plan in flight."""
        return bool(self.rows) or self.asked

    def known(self, tokens: Tokens[int]) -> Ids:
        """All tokens of the sequence, as an array."""
        if len(tokens) > len(self.tokens):
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        if self.length < len(tokens):
            self.tokens[self.length : len(tokens)] = tokens[self.length :]
            self.length = len(tokens)
        return self.tokens[: self.length]


def judged(rate: float, right: int, guessed: int, memory: float = MEMORY) -> float:
    """The rate after so many right guesses in a row of those in flight."""
    for outcome in [1.0] * right + [0.0] * (right < guessed):
        rate += memory * (outcome - rate)
    return rate


def worthwhile(rate: float, most: int, rows: int, row_cost: float) -> int:
    """The number of guesses, up to `most`, that promise most tokens for their cost in a step of
    `rows` other rows; 0 if none is worth a row. rate: the chance of a guess after right guesses.
    row_cost: as `StepCosts.row`.

    Beside other rows, a guessing sequence waits while the rest go on with the next plan: the
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
