"""A plan in the making.

Owns what has been put into this step so far. Decides nothing.
"""

from __future__ import annotations

from itertools import chain

from saccade.core.plan import Encode, Move, Open, Plan, Row, Splice
from saccade.core.types import ImageKey
from saccade.sched.chunk import PatchBudget, splices
from saccade.sched.sequence import Sequence


class Draft:
    """One step: `tokens` is how many more tokens prefill may add, `patches` what may still be
    encoded.
    """

    def __init__(self, tokens: int, patches: int) -> None:
        self.tokens = tokens
        self.patches = PatchBudget(patches)
        self.prefilling = False  # whether some sequence has had its turn to prefill
        self.moves: list[Move] = []
        self.encode: list[Encode] = []
        self.save: list[ImageKey] = []
        self._open: list[Open] = []
        self._decode: list[tuple[Row, Sequence]] = []
        self._prefill: list[tuple[Row, Sequence]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """One per row of the plan, in order."""
        return [sequence for _, sequence in chain(self._decode, self._prefill)]

    @property
    def prefilled(self) -> list[tuple[Sequence, int]]:
        """Sequences with a chunk in this step, and where it ends."""
        return [(sequence, row.start + row.length) for row, sequence in self._prefill]

    def save_picture(self, key: ImageKey, removed: list[Move], saved: bool) -> None:
        """Write an embedding to disk if it is to be `saved`; others go for it, of which some may
        only have been about to be written.
        """
        self.moves += [move for move in removed if move.key not in self.save]
        gone = {move.key for move in removed}
        self.save = [other for other in self.save if other not in gone] + [key] * saved

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

    def decode(self, sequence: Sequence) -> None:
        """Compute the newest token and draw the next."""
        self._decode.append((self._row(sequence, 1, True), sequence))

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Compute up to `end`; if nothing is left then, draw the next token."""
        length = end - sequence.computed
        self._prefill.append((self._row(sequence, length, end == len(sequence.tokens)), sequence))
        self.tokens -= length

    def build(self, step: int, close: list[int], reading: bool) -> Plan:
        """`reading`: embeddings are being read from disk, for which to wait if there is nothing
        else to do.
        """
        splice: list[Splice] = []
        row = len(self._decode)
        for chunk, sequence in self._prefill:
            splice += splices(sequence.content, chunk.start, chunk.start + chunk.length, row)
            row += chunk.length
        return Plan(
            step=step,
            close=tuple(close),
            open=tuple(self._open),
            moves=tuple(self.moves),
            encode=tuple(self.encode),
            save=tuple(self.save),
            rows=tuple(row for row, _ in chain(self._decode, self._prefill)),
            splices=tuple(splice),
            wait=reading and not (close or self._open or self._decode or self._prefill),
        )

    def _row(self, sequence: Sequence, length: int, sample: bool) -> Row:
        told = sequence.told
        if told == len(sequence.pages):
            return Row(sequence.slot, sequence.computed, length, (), sample)
        sequence.told = len(sequence.pages)
        return Row(sequence.slot, sequence.computed, length, tuple(sequence.pages[told:]), sample)
