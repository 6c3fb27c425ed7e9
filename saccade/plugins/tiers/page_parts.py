"""Accesses the KV pool's pages and states as bytes, by slot index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from saccade.core.plan import Happened, PageCopy, TierMoves
from saccade.kernels.device import send


class PoolParts:
    """One rank's shard of the KV pool: for each layer, a tensor uint8 [slots, bytes]."""

    def __init__(self, pages: Sequence[torch.Tensor], lines: torch.Tensor) -> None:
        """Use the pool's tensors.

        pages: for each layer, the tensor of pages.
        lines: the tensors of states, [slots, bytes].
        """
        self._pages = pages
        self._lines = [lines]
        self.device = lines.device

    def of(self, state: bool) -> Sequence[torch.Tensor]:
        return self._lines if state else self._pages

    def width(self, state: bool) -> int:
        """Return the bytes of a state, or of a page, on this rank."""
        return sum(part.shape[1] for part in self.of(state))

    def gather(self, copies: Sequence[PageCopy], state: bool) -> torch.Tensor:
        """Return the bytes in the slots of these copies, [n, width]."""
        places = send(np.array([copy.place for copy in copies]), self.device)
        return torch.cat([part.index_select(0, places) for part in self.of(state)], dim=1)

    def scatter(self, copies: Sequence[PageCopy], state: bool, rows: torch.Tensor) -> None:
        """Write bytes [n, width or more] to the slots of these copies."""
        places, start = send(np.array([copy.place for copy in copies]), self.device), 0
        for part in self.of(state):
            part.index_copy_(0, places, rows[:, start : start + part.shape[1]])
            start += part.shape[1]


class PageTransfers(Protocol):
    """Copies pages between the pool and one tier."""

    def leave(self, moves: TierMoves) -> None:
        """Drop and save pages. Call this for all tiers before the slots are overwritten."""
        ...

    def come(self, moves: TierMoves) -> None:
        """Read pages from the tier, and write pages that were read to the pool."""
        ...

    @property
    def is_reading(self) -> bool:
        """Whether a read is in progress, or has finished and awaits `collect`."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether `collect` would return an event."""
        ...

    def collect(self) -> Sequence[tuple[bytes, Happened]]:
        """Return the reads and writes that have finished since the last call, with their
        outcome.
        """
        ...

    def close(self) -> None:
        """Finish all writes."""
        ...


def by_kind(copies: Sequence[PageCopy]) -> list[tuple[bool, list[PageCopy]]]:
    """Group the copies by whether they are of states or of pages. Empty groups are left out."""
    kinds = ((state, [copy for copy in copies if copy.state == state]) for state in (False, True))
    return [(state, found) for state, found in kinds if found]
