"""A plan in the making.

Owns what has been put into this step so far. Decides nothing.
"""

from __future__ import annotations

from itertools import chain

from saccade.core.plan import Encode, Open, Plan, Row, Splice
from saccade.core.types import ImageKey
from saccade.sched.chunk import PatchBudget, splices
from saccade.sched.sequence import Sequence


class Draft:
    """One step: `tokens` is how many more tokens prefill may add, `patches` what may still be encoded."""

    def __init__(self, tokens: int, patches: int) -> None:
        self.tokens = tokens
        self.patches = PatchBudget(patches)
        self.prefilling = False  # whether some sequence has had its turn to prefill
        self.encode: list[Encode] = []
        self._open: list[Open] = []
        self._drop: list[ImageKey] = []
        self._decode: list[tuple[Row, Sequence]] = []
        self._prefill: list[tuple[Row, Sequence]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """One per row of the plan, in order."""
        return [sequence for _, sequence in chain(self._decode, self._prefill)]

    def open(self, sequence: Sequence) -> None:
        request = sequence.request
        self._open.append(
            Open(
                slot=sequence.slot,
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                spans=request.spans,
                images=request.images,
                sampling=request.sampling,
                pages=tuple(sequence.pages),
            )
        )

    def encode_picture(self, encode: Encode, patches: int, evicted: tuple[ImageKey, ...]) -> None:
        self.encode.append(encode)
        self.patches.spent += patches
        self._drop += evicted

    def decode(self, sequence: Sequence) -> None:
        """Compute the newest token and draw the next."""
        self._decode.append((self._row(sequence, 1, True), sequence))

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Compute up to `end`; if nothing is left then, draw the next token."""
        length = end - sequence.computed
        self._prefill.append((self._row(sequence, length, end == len(sequence.tokens)), sequence))
        self.tokens -= length

    def build(self, step: int, close: list[int]) -> Plan:
        splice: list[Splice] = []
        row = len(self._decode)
        for chunk, sequence in self._prefill:
            splice += splices(sequence.content, chunk.start, chunk.start + chunk.length, row)
            row += chunk.length
        return Plan(
            step=step,
            close=tuple(close),
            open=tuple(self._open),
            drop=tuple(self._drop),
            encode=tuple(self.encode),
            rows=tuple(row for row, _ in chain(self._decode, self._prefill)),
            splices=tuple(splice),
        )

    def _row(self, sequence: Sequence, length: int, sample: bool) -> Row:
        told = sequence.told
        if told == len(sequence.pages):
            return Row(sequence.slot, sequence.computed, length, (), sample)
        sequence.told = len(sequence.pages)
        return Row(sequence.slot, sequence.computed, length, tuple(sequence.pages[told:]), sample)
