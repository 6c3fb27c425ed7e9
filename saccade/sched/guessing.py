"""Guesses within a plan in flight: their masks, and which of them were right.

Owns nothing. A guess is right if the row before it counts and has drawn it.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from saccade.core.plan import HeadGuesses, Row
from saccade.sched.answers import jumps
from saccade.sched.builder import Flight
from saccade.sched.draft_states import DraftStates
from saccade.sched.drafts import Drafter
from saccade.sched.sequence import Run, Sequence


def guesses_of(flight: Flight) -> dict[Run, list[int]]:
    """The guesses in a plan, in order, of each run that guesses."""
    found: dict[Run, list[int]] = {}
    for row, (_, run) in zip(flight.plan.rows, flight.rows, strict=True):
        if row.draft:
            found.setdefault(run, []).append(row.tokens[0])
    return found


def masks_of(sequence: Sequence, run: Run, row: Row, guesses: list[int]) -> list[bytes]:
    """The masks of a row, and of the guesses behind it, once the row's own tokens are known.

    Raises InvalidRequest if the grammar has become too complex.
    """
    guide = sequence.guide
    assert guide is not None
    masks = [guide.mask()]
    known = sequence.tokens[row.start + row.length :]  # forced: what the row draws, and more
    if not known:
        masks += guide.ahead(guesses, jumps(sequence.request))
    elif guesses[:1] == known:  # if there are more, the next plan has them
        masks += [guide.mask(), *guide.ahead(guesses[1:], jumps(sequence.request))]
    run.speculation.foreseen = len(masks) - 1
    return masks + [guide.anything] * (len(guesses) + 1 - len(masks))


def right_guesses(flight: Flight, drawn: Tokens[int]) -> dict[Run, int]:
    """The number of right guesses of each run that guesses in a plan; from now on no plan in flight
    draws for these runs. drawn: as in `StepResult.tokens`.
    """
    right: dict[Run, int] = {}
    newest: dict[Run, int | None] = {}  # drawn by a row that counts
    tokens = iter(drawn)
    for row, (_, run) in zip(flight.plan.rows, flight.rows, strict=True):
        token = next(tokens) if row.sample else None
        if row.draft:
            found, foreseen = right.setdefault(run, 0), run.speculation.foreseen
            if newest[run] == row.tokens[0] and (foreseen is None or found < foreseen):
                right[run] += 1
            else:
                token = None
        newest[run] = token
    for run in right:
        run.drawing = 0
    return right


def counts(row: Row, sequence: Sequence, run: Run, left: dict[Run, int]) -> bool:
    """True unless a row's guess is wrong, or comes too late; tells the sequence's account. Called
    for each row in order. left: right guesses whose rows are still to come.
    """
    source = run.speculation.source
    if not row.draft:
        if run in left:
            sequence.account.guessed(source, wrong=run.speculation.rows - left[run])
        return True
    if not left[run] or sequence.run is not run:
        return False
    left[run] -= 1
    sequence.account.guessed(source, right=1)
    return True


def settle(
    drafter: Drafter,
    states: DraftStates,
    flight: Flight,
    right: dict[Run, int],
    found: Tokens[HeadGuesses],
) -> None:
    """Sequences go on behind the last right guess, with the guesses `found` by the model's head."""
    heard = iter(found)
    for row, (_, run) in zip(flight.plan.rows, flight.rows, strict=True):
        if row.guess:
            drafter.told(run, next(heard))
    sequences = {run: sequence for sequence, run in flight.rows if run in right}
    for run, sequence in sequences.items():
        drafter.settle(run, right[run])
        if sequence.run is run:
            assert run.drawing == 0 and len(sequence.tokens) > run.computed
            run.planned = run.drawn = run.computed
            states.settled(run, right[run])
            run.speculation.told = len(sequence.tokens) == run.computed + 1
