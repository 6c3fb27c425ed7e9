"""A plan in the making, and a plan in flight.

Owns what has been put into a step so far. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from saccade.cache.content import Content
from saccade.core.plan import Deliver, Encode, Move, Open, Plan, Row, Splice, StateCopy
from saccade.core.types import ImageKey
from saccade.sched.sequence import Run, Sequence


@dataclass(slots=True)
class Flight:
    """A plan that was handed out and has no result yet. `rows`: one per row of the plan. `pages`:
    given up by sequences that the plan still writes for; free once it has been applied. `unmasked`:
    masks of its rows are yet to be sent.
    """

    plan: Plan
    rows: list[tuple[Sequence, Run]]
    unmasked: bool
    pages: list[int] = field(default_factory=list)


class PlanBuilder:
    """One step. `tokens`: how many more tokens prefill may add. `prefilling`: some sequence has had
    its turn to prefill. `exceeded`: an image was put on the device beyond the budget. `patches`:
    of images that begin to be encoded. `again`: something was found out on the way for which
    another look is worth while.
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
        self._prefill: list[tuple[Row, Sequence, Run]] = []

    @property
    def decodes(self) -> bool:
        """Whether some row draws the next token of an answer."""
        return bool(self._decode)

    @property
    def rows(self) -> list[tuple[Sequence, Run]]:
        """One per row of the plan, in order."""
        return [(sequence, run) for _, sequence, run in chain(self._decode, self._prefill)]

    @property
    def works(self) -> bool:
        """Whether there is anything in the step."""
        rows = self._open or self._decode or self._prefill
        return bool(rows or self.moves or self.encode or self.save or self.deliver)

    def save_embedding(self, key: ImageKey, removed: list[Move], saved: bool) -> None:
        """Write an embedding to disk if it is to be `saved`; others make room for it, some of which
        may only have been about to be written.
        """
        self.moves += [move for move in removed if move.key not in self.save]
        gone = {move.key for move in removed}
        self.save = [other for other in self.save if other not in gone] + [key] * saved

    def open(self, sequence: Sequence, run: Run) -> None:
        """A sequence enters its slot."""
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
                prompt_logprobs=request.prompt_logprobs,
                reading=request.reading,
            )
        )

    def decode(self, sequence: Sequence, run: Run) -> None:
        """Compute the newest token, which a plan in flight may yet draw, and draw the next."""
        self._decode.append((_row(sequence, run, run.planned + 1), sequence, run))

    def prefill(self, sequence: Sequence, run: Run, end: int) -> None:
        """Compute up to `end`; if nothing is left then, draw the next token, if any is wanted."""
        self.tokens -= end - run.planned
        self._prefill.append((_row(sequence, run, end), sequence, run))

    def build(self, step: int, close: list[int], tower: int, wait: bool) -> Plan:
        """`tower`, `wait`: as in `Plan`."""
        splice: list[Splice] = []
        row = len(self._decode)
        for chunk, sequence, _ in self._prefill:
            splice += splices(sequence.content, chunk.start, chunk.start + chunk.length, row)
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
            rows=tuple(row for row, _, _ in chain(self._decode, self._prefill)),
            splices=tuple(splice),
            restore=tuple(self.restore),
            snapshot=tuple(self.snapshot),
            wait=wait,
        )


def _row(sequence: Sequence, run: Run, end: int) -> Row:
    """The row that computes `[run.planned, end)`, which then counts as planned."""
    start, sample = run.planned, end == sequence.length and sequence.request.reading is None
    decoding = run.drawn == start == end - 1
    unknown = () if decoding else tuple(sequence.tokens[max(start, run.opened) : end])
    pages = tuple(run.pages[run.announced :])
    run.planned, run.announced = end, len(run.pages)
    if sample:
        run.drawing, run.drawn = run.drawing + 1, end
    masked = sample and sequence.guide is not None
    scored = sequence.to_score(start, end)
    read = sequence.to_read(start, end)
    return Row(run.slot, start, end - start, pages, sample, masked, unknown, scored, read)


def splices(content: Content, start: int, end: int, row: int) -> list[Splice]:
    """Images in tokens `[start, end)`, whose first token is batch row `row`."""
    return [
        Splice(row + position, length, key, offset)
        for position, length, key, offset in content.shown(start, end)
    ]
