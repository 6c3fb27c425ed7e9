"""What the pool keeps of pages and states, as bytes: read and written by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from saccade.core.plan import Happened, PageCopy, TierMoves
from saccade.kernels.device import send


class PoolParts:
    """One rank's part of the pool: of each layer what it keeps, uint8 [places, bytes]."""

    def __init__(self, pages: Sequence[torch.Tensor], lines: torch.Tensor) -> None:
        """Take the pool's tensors. `lines`: of states."""
        self._pages = pages
        self._lines = [lines]
        self.device = lines.device

    def of(self, state: bool) -> Sequence[torch.Tensor]:
        return self._lines if state else self._pages

    def width(self, state: bool) -> int:
        """Return the bytes of a state, or of a page."""
        return sum(part.shape[1] for part in self.of(state))

    def gather(self, copies: Sequence[PageCopy], state: bool) -> torch.Tensor:
        """Return the bytes in these places, [n, width]."""
        places = send(np.array([copy.place for copy in copies]), self.device)
        return torch.cat([part.index_select(0, places) for part in self.of(state)], dim=1)

    def scatter(self, copies: Sequence[PageCopy], state: bool, rows: torch.Tensor) -> None:
        """Write bytes [n, at least width] to these places."""
        places, start = send(np.array([copy.place for copy in copies]), self.device), 0
        for part in self.of(state):
            part.index_copy_(0, places, rows[:, start : start + part.shape[1]])
            start += part.shape[1]


class PageTransfers(Protocol):
    """Copies pages between the pool and one tier."""

    def leave(self, moves: TierMoves) -> None:
        """Drop, save and forget: in all tiers before any place is written to."""
        ...

    def come(self, moves: TierMoves) -> None:
        """Fetch and place."""
        ...

    @property
    def is_reading(self) -> bool:
        """Return True while a read is in progress, or has ended and awaits `collect`."""
        ...

    @property
    def has_events(self) -> bool:
        """Return True if `collect` has something to report."""
        ...

    def collect(self) -> Sequence[tuple[bytes, Happened]]:
        """Return the reads and writes that have ended since the last call."""
        ...

    def close(self) -> None:
        """Finish all writing."""
        ...


def by_kind(copies: Sequence[PageCopy]) -> list[tuple[bool, list[PageCopy]]]:
    """Split pages and states."""
    kinds = ((state, [copy for copy in copies if copy.state == state]) for state in (False, True))
    return [(state, found) for state, found in kinds if found]
