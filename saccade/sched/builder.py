"""Builds a plan, and tracks plans in flight. The scheduler and its parts decide what a plan
contains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from saccade.cache.content import Content
from saccade.core.plan import (
    NO_LINE,
    Deliver,
    Encode,
    FreeMemory,
    Move,
    Open,
    PageMoves,
    Plan,
    Row,
    Splice,
    StateCopy,
    StepResult,
    following,
)
from saccade.core.token_rules import NO_RULES
from saccade.core.types import ImageKey, PooledOutput, PromptScores, TokenLogprobs
from saccade.sched.sequence import Run, Sequence

NOTHING_SHARED: Mapping[ImageKey, ImageKey] = MappingProxyType({})

PlannedRow = tuple[Row, Sequence, Run]
"""A row, with its sequence and run."""


class PlannedOutcome(NamedTuple):
    """The result of one row of a plan, with the sequence and the run that it belongs to."""

    row: Row
    sequence: Sequence
    run: Run
    token: int | None  # the sampled token, or None if the row samples none
    logprobs: TokenLogprobs | None  # None unless requested
    scores: PromptScores | None  # None unless requested
    pooled_output: PooledOutput | None  # None unless requested
    non_finite: bool  # the model computed NaN or infinity in this row


@dataclass(slots=True)
class InFlightPlan:
    """A plan that was sent to the workers. It has `left` steps without a result."""

    plan: Plan
    rows: list[PlannedRow]  # the rows of the step whose result is next
    unmasked: bool  # masks are still to be sent
    left: int  # steps without a result so far
    # pages of ended sequences that the plan still writes to. They become free when it is applied.
    pages: list[int] = field(default_factory=list)
    planned: float = field(default_factory=time.monotonic)  # the time at which it was made
    outdated: bool = False  # a part would now plan the steps that are left differently
    halted: bool = False  # `CancelSteps` is to be sent, or was sent

    def advance(self) -> None:
        """Advance to the plan's next step. Each row then computes the token that the last step
        sampled.
        """
        self.left -= 1
        for place, (row, sequence, run) in enumerate(self.rows):
            self.rows[place] = following(row), sequence, run

    def take_back(self) -> None:
        """Undo the planning of skipped steps. Such a plan contains only decoding rows."""
        for row, sequence, run in self.rows:
            if sequence.run is run:
                run.planned -= self.left
                run.drawing -= self.left
                run.drawn = run.planned
                run.announced -= len(row.pages)

    def outcomes(self, result: StepResult) -> Iterator[PlannedOutcome]:
        """Yield the outcome of each row, in the order of the rows."""
        drawn, logprobs = iter(enumerate(result.tokens)), dict(result.logprobs)
        scores, pooled_outputs = dict(result.scores), dict(result.pooled_outputs)
        for place, (row, sequence, run) in enumerate(self.rows):
            at, token = next(drawn) if row.sample else (-1, None)
            yield PlannedOutcome(
                row,
                sequence,
                run,
                token,
                logprobs.get(at),
                scores.get(place),
                pooled_outputs.get(place),
                place in result.non_finite,
            )


class PlanBuilder:
    """Collects the rows and other work of one step. `build` returns the plan."""

    def __init__(self, tokens: int, steps: int = 1) -> None:
        # limits and flags
        self.tokens = tokens  # tokens left for prefill
        self.share = tokens  # maximum tokens for prefill of one client
        self.steps = steps  # as in `Plan`
        self.width = 0  # rows in the step, counting one for each running sequence
        self.prefilling = False  # a sequence has had the chance to prefill
        self.exceeded = False  # an image was put on the device beyond the budget
        self.patches = 0  # patches of the images whose encoding starts
        self.masked = False  # a row needs a mask
        self.again = False  # state has changed, so that another planning pass may find more work
        # other contents of the plan
        self.moves: list[Move] = []
        self.encode: list[Encode] = []
        self.save: list[ImageKey] = []
        self.restore: list[StateCopy] = []
        self.snapshot: list[StateCopy] = []
        self.deliver: list[Deliver] = []
        self._open: list[Open] = []
        # rows, in the plan's order
        self._decode: list[PlannedRow] = []
        self._decode_with_token: list[
            PlannedRow
        ] = []  # decode rows that send their token to the workers
        self._prefill: list[PlannedRow] = []
        self._spent: dict[str, int] = {}  # prefill tokens planned, by client

    def room(self, client: str) -> int:
        """Return how many more prompt tokens of this client fit in the step."""
        return min(self.tokens, max(0, self.share - self._spent.get(client, 0)))

    @property
    def decodes(self) -> bool:
        """Return True if the step has a decoding row."""
        return bool(self._decode or self._decode_with_token)

    @property
    def rows(self) -> list[PlannedRow]:
        """The rows added so far, in the plan's order."""
        return self._decode + self._decode_with_token + self._prefill

    @property
    def works(self) -> bool:
        """Return True if the step contains work."""
        rows = self._open or self._decode or self._decode_with_token or self._prefill
        return bool(rows or self.moves or self.encode or self.save or self.deliver)

    def save_embedding(self, key: ImageKey, removed: list[Move], saved: bool) -> None:
        """Add the write of an embedding to disk if `saved` is True, and the moves that free space
        for it.

        removed: moves that delete other embeddings from disk. Those that have not been written yet
            are not written.
        """
        self.moves += [move for move in removed if move.key not in self.save]
        gone = {move.key for move in removed}
        self.save = [other for other in self.save if other not in gone] + [key] * saved

    def open(self, sequence: Sequence, run: Run) -> None:
        """Assign a slot in the workers to a sequence, and send them its tokens and settings."""
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
        self,
        sequence: Sequence,
        run: Run,
        newest: tuple[int, ...] = (),
        *,
        draft: bool = False,
        keep: int = NO_LINE,
        head_drafts: int = 0,
    ) -> Row:
        """Add a row that computes the newest token and samples the next one. Return the row.

        A plan in flight may still have to sample the newest token.

        newest: the newest token, if the workers do not have it.
        draft, keep, head_drafts: as in `Row`.
        """
        row = self._row(sequence, run, run.planned + 1, newest, draft, keep, head_drafts)
        if (more := self.steps - 1) > 0:
            run.planned, run.drawing = run.planned + more, run.drawing + more
            run.drawn = run.planned
        (self._decode_with_token if newest else self._decode).append((row, sequence, run))
        self.width += draft
        return row

    def prefill(self, sequence: Sequence, run: Run, end: int, singly: bool) -> Row:
        """Add rows for the tokens up to `end`, and return the last row.

        If `end` is the end of the sequence, the last row samples the next token.

        singly: True to compute each token that a grammar forced in a separate row, like a sampled
            token. Otherwise results would depend on how many forced tokens happen to be found in
            time.
        """
        count = end - run.planned
        self.tokens -= count
        self._spent[sequence.client] = self._spent.get(sequence.client, 0) + count
        while True:
            start = run.planned
            stop = min(end, max(run.opened, start + 1)) if singly else end
            unknown = tuple(sequence.tokens[max(start, run.opened) : stop])
            row = self._row(sequence, run, stop, unknown)
            self._prefill.append((row, sequence, run))
            if stop == end:
                return row

    def _row(
        self,
        sequence: Sequence,
        run: Run,
        end: int,
        tokens: tuple[int, ...],
        draft: bool = False,
        keep: int = NO_LINE,
        head_drafts: int = 0,
    ) -> Row:
        """Return the row that computes `[run.planned, end)`, and update the run."""
        start, sample = run.planned, end == sequence.length and sequence.request.reading is None
        pages = tuple(run.pages[run.announced :])
        run.planned, run.announced = end, len(run.pages)
        if sample:
            run.drawing, run.drawn = run.drawing + 1, end
        masked = sample and sequence.grammar_state is not None
        self.masked |= masked
        return Row(
            run.slot,
            start,
            end - start,
            pages,
            sample,
            masked,
            tokens=tokens,
            draft=draft,
            keep=keep,
            head_drafts=head_drafts,
            extras=sequence.extras(start, end),
        )

    def build(
        self,
        step: int,
        close: list[int],
        tower: int,
        wait: bool,
        pages: PageMoves = (),
        unused: FreeMemory | None = None,
    ) -> Plan:
        """Return the plan.

        step, tower, wait, pages, unused: as in `Plan`.
        close: the slots whose sequences have ended.
        """
        splice: list[Splice] = []
        row = len(self._decode) + len(self._decode_with_token)
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
            rows=tuple([row for row, _, _ in self.rows]),
            splices=tuple(splice),
            restore=tuple(self.restore),
            snapshot=tuple(self.snapshot),
            wait=wait,
            pages=pages,
            unused=unused,
            steps=self.steps if self._decode else 1,
        )


def splices(
    content: Content,
    start: int,
    end: int,
    row: int,
    shared: Mapping[ImageKey, ImageKey] = NOTHING_SHARED,
) -> list[Splice]:
    """Return the `Splice`s that put image embeddings into the batch rows of tokens `[start, end)`.

    row: the batch row of token `start`.
    shared: maps the key of an image in the request to the key of the image with the same pixels
        whose embedding is used instead.
    """
    return [
        Splice(row + position, length, shared.get(key, key), offset)
        for position, length, key, offset, _ in content.shown(start, end)
    ]
