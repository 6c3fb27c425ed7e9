"""Which parts a sequence's draws have, and in which order these change its logits.

Owns one worker's parts. On a CPU each is made with the first sequence that asks for it. On a GPU
edits are there from the start, since their tables have a fixed place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from saccade.core.plan import Open
from saccade.kernels.reference.ops import Ops
from saccade.runtime.row_parts import DrawPart, Draws, RowEdit
from saccade.runtime.sampling.edits import Edit, SlotEdits
from saccade.runtime.sampling.token_rules import RowBans, RowThinking


class RowByRow:
    """A part that goes through its rows one by one.

    make: makes the edit for a sequence that asks.
    """

    def __init__(self, make: Callable[[Open], RowEdit]) -> None:
        self._make = make
        self._slots: dict[int, RowEdit] = {}

    def open(self, opened: Open) -> None:
        self._slots[opened.slot] = self._make(opened)

    def close(self, slot: int) -> None:
        del self._slots[slot]

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool, /) -> bool:
        left = masked
        for at, slot in enumerate(draws.rows):
            if slot in self._slots:
                left |= self._slots[slot].edit(logits[at], draws.counts[at], masked)
        return left

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        for at, slot in enumerate(draws.rows):
            if slot in self._slots:
                self._slots[slot].add_token(tokens[at : at + 1])


class DrawParts:
    """The parts for all slots in one worker."""

    def __init__(
        self, vocab_size: int, slots: int, stop_ids: Sequence[int], place: torch.device, ops: Ops
    ) -> None:
        self._makers: tuple[Callable[[Open], RowEdit], ...] = (
            lambda opened: RowBans.of(opened, place),
            lambda opened: Edit.of(opened, vocab_size, stop_ids, place),
            lambda opened: RowThinking.of(opened, vocab_size, place),
        )
        self._made: dict[int, DrawPart] = {}
        if ops.samples:
            self._made[1] = SlotEdits(vocab_size, slots, stop_ids, place)

    @property
    def made(self) -> list[DrawPart]:
        """Return the parts made so far, in their order."""
        return [self._made[kind] for kind in sorted(self._made)]

    def open(self, opened: Open) -> tuple[DrawPart, ...]:
        """Open and return the parts that a sequence asks for."""
        rules = opened.rules
        asked = (
            rules is not None and rules.forbid,
            opened.sampling.edits,
            rules is not None and rules.thinking is not None,
        )
        joined = []
        for kind, make in enumerate(self._makers):
            if asked[kind]:
                if kind not in self._made:
                    self._made[kind] = RowByRow(make)
                self._made[kind].open(opened)
                joined.append(self._made[kind])
        return tuple(joined)
