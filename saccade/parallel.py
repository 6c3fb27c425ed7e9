"""Tensor parallelism: which slice of the model this process holds, and the collectives over the slices.

Layers take a `Shard` when they are built and call `all_reduce` where the mathematics needs it; nothing else in the project
knows of ranks. For now there is one rank, and the collectives are the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        if self.size != 1:
            raise NotImplementedError("tensor parallelism over more than one rank")

    def divide(self, n: int, what: str) -> int:
        """This rank's share of `n` things. `what` names them in the error."""
        if n % self.size:
            raise ValueError(f"{n} {what} cannot be divided among {self.size} ranks")
        return n // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return x
