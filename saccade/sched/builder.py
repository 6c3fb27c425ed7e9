"""A plan in the making, and a plan in flight.

Owns the content of a step so far. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import MappingProxyType

from saccade.cache.content import Content
from saccade.core.plan import (
    NO_LINE,
    NO_PAGE_MOVES,
    Deliver,
    Encode,
    Move,
    Open,
    PageMoves,
    Plan,
    Row,
    Splice,
    StateCopy,
)
from saccade.core.token_rules import NO_RULES
from saccade.core.types import ImageKey
from saccade.sched.sequence import Run, Sequence

NOTHING_SHARED: Mapping[ImageKey, ImageKey] = MappingProxyType({})


@dataclass(slots=True)
class Flight:
    """A plan handed out and without a result. `rows`: one per row of the plan. `pages`: released by
    sequences for which the plan still writes; free once the plan was applied. `unmasked`: masks of
    its rows are still to be sent. `planned`: the time of handing out.
    """

    plan: Plan
    rows: list[tuple[Sequence, Run]]
    unmasked: bool
    pages: list[int] = field(default_factory=list)
    planned: float = field(default_factory=time.monotonic)


class PlanBuilder:
    """One step in the making. `tokens`: tokens left for prefill. `prefilling`: some sequence has
    had its turn to prefill. `exceeded`: an image was put on the device beyond the budget.
    `patches`: patches of images whose encoding begins. `again`: new facts make a second pass
    worthwhile.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.prefilling = False
        self.exceeded = False
        self.patches = 0
        self.again = False
        self.moves: list[Move] = []
        self.encode: list[Encode] = []
        self.save: list[ImageKey] = []
        self.restore: list[StateCopy] = []
        self.snapshot: list[StateCopy] = []
        self.deliver: list[Deliver] = []
        self._open: list[Open] = []
        self._decode: list[tuple[Row, Sequence, Run]] = []
        self._told: list[tuple[Row, Sequence, Run]] = []  # of one token that the worker is told
        self._prefill: list[tuple[Row, Sequence, Run]] = []

    @property
    def decodes(self) -> bool:
        """True if some row samples an answer token."""
        return bool(self._decode or self._told)

    @property
    def rows(self) -> list[tuple[Sequence, Run]]:
        """One per row of the plan, in order."""
        return [(sequence, run) for _, sequence, run in self._all]

    @property
    def _all(self) -> Iterator[tuple[Row, Sequence, Run]]:
        return chain(self._decode, self._told, self._prefill)

    @property
    def works(self) -> bool:
        """True if the step has any work."""
        rows = self._open or self._decode or self._told or self._prefill
        return bool(rows or self.moves or self.encode or self.save or self.deliver)

    def save_embedding(self, key: ImageKey, removed: list[Move], saved: bool) -> None:
        """Write an embedding to disk if `saved`; the `removed` embeddings make room, some of them
        perhaps not yet written.
        """
        self.moves += [move for move in removed if move.key not in self.save]
        gone = {move.key for move in removed}
        self.save = [other for other in self.save if other not in gone] + [key] * saved

    def open(self, sequence: Sequence, run: Run) -> None:
        """Open a slot for a sequence."""
        request = sequence.request
        self._open.append(
            Open(
                slot=run.slot,
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                spans=request.spans,
                images=request.images,
                sampling=request.sampling,
                pages=tuple(run.pages),
                rules=None if request.rules == NO_RULES else request.rules,
                adapter=request.adapter.number,
            )
        )

    def decode(
        self, sequence: Sequence, run: Run, guesses: Tokens[int] = (), asked: int = 0
    ) -> None:
        """Compute the newest token, which a plan in flight may still be sampling, and sample the
        next; and the token after each guess, if right. `Speculation.lines` are the guesses'.
        asked: as `Row.guess`.
        """
        speculation, start = run.speculation, run.planned
        kept = chain(speculation.lines, repeat(NO_LINE))
        row = replace(_row(sequence, run, start + 1), keep=next(kept), guess=asked)
        if speculation.told:
            row = replace(row, tokens=(sequence.tokens[start],))
        (self._told if speculation.told else self._decode).append((row, sequence, run))
        for guess, line in zip(guesses, kept):
            row = _row(sequence, run, run.planned + 1)
            row = replace(row, tokens=(guess,), draft=True, keep=line)
            self._told.append((row, sequence, run))
        speculation.told, speculation.rows = False, len(guesses)

    def prefill(self, sequence: Sequence, run: Run, end: int, singly: bool) -> None:
        """Compute up to `end`; if nothing is left then, draw the next token, if any is wanted.

        singly: tokens that were forced in the answer each have a row, as drawn tokens and guesses
        have: which of them a grammar foresees in time must not change the answer.
        """
        self.tokens -= end - run.planned
        while (start := run.planned) < end:
            stop = min(end, max(run.opened, start + 1)) if singly else end
            unknown = tuple(sequence.tokens[max(start, run.opened) : stop])
            row = replace(_row(sequence, run, stop), tokens=unknown)
            self._prefill.append((row, sequence, run))

    def build(
        self, step: int, close: list[int], tower: int, wait: bool, pages: PageMoves = NO_PAGE_MOVES
    ) -> Plan:
        """`tower`, `wait`, `pages`: as in `Plan`."""
        splice: list[Splice] = []
        row = len(self._decode) + len(self._told)
        for chunk, sequence, _ in self._prefill:
            end = chunk.start + chunk.length
            splice += splices(sequence.content, chunk.start, end, row, sequence.shown.shared)
            row += chunk.length
        return Plan(
            step=step,
            close=tuple(close),
            open=tuple(self._open),
            moves=tuple(self.moves),
            encode=tuple(self.encode),
            tower=tower,
            save=tuple(self.save),
            deliver=tuple(self.deliver),
            rows=tuple(row for row, _, _ in self._all),
            splices=tuple(splice),
            restore=tuple(self.restore),
            snapshot=tuple(self.snapshot),
            wait=wait,
            pages=pages,
        )


def _row(sequence: Sequence, run: Run, end: int) -> Row:
    """The row that computes `[run.planned, end)`; counts those tokens as planned."""
    start, sample = run.planned, end == sequence.length and sequence.request.reading is None
    pages = tuple(run.pages[run.announced :])
    run.planned, run.announced = end, len(run.pages)
    if sample:
        run.drawing, run.drawn = run.drawing + 1, end
    masked = sample and sequence.guide is not None
    extras = sequence.extras(start, end)
    return Row(run.slot, start, end - start, pages, sample, masked, extras=extras)


def splices(
    content: Content,
    start: int,
    end: int,
    row: int,
    shared: Mapping[ImageKey, ImageKey] = NOTHING_SHARED,
) -> list[Splice]:
    """Images in tokens `[start, end)`; the first token is batch row `row`. shared: as in
    `ShownImages`.
    """
    return [
        Splice(row + position, length, shared.get(key, key), offset)
        for position, length, key, offset, _ in content.shown(start, end)
    ]
