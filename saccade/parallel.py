"""Tensor parallelism: this process's slice of the model.

Layers take a `Shard` at construction and call its collectives where the mathematics needs them.
No other code knows about ranks. The plugin `parallel` has the ways in which several reach each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.errors import ConfigError


class PeerLost(Exception):
    """A collective failed: another rank is gone, or this rank is cut off."""


class Collectives(Protocol):
    """Ranks that compute together.

    Each makes the same calls in the same order, with equally shaped tensors. The results have the
    same bits on every rank. They are on the tensor's device, and on CUDA in stream order. Raises
    PeerLost if another rank's death is noticed. In shared memory it goes unnoticed: the ranks'
    supervisor must end this rank too.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks. `x` is contiguous, and may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return everyone's `x` in rank order, [size, *x.shape]. `x` is contiguous."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's `x`, on every rank.

        `x` is contiguous, and its content on other ranks is overwritten.
        """
        ...

    def leave(self) -> None:
        """Leave the other ranks in order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice `rank` of `size`.

    `group` is None without peers, or without messages for them. With more ranks than slices,
    `replicas` of them hold the same slice, and this rank is number `replica`. expert_runs: how many
    runs of whole experts all ranks hold.
    """

    rank: int = 0
    size: int = 1
    group: Collectives | None = None
    replica: int = 0
    replicas: int = 1
    expert_runs: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and 0 <= self.replica < self.replicas
        assert self.size * self.replicas % self.expert_runs == 0

    def spread(self, slices: int, expert_runs: int) -> Shard:
        """Return the same rank, where all ranks hold `slices` slices and `expert_runs` runs of
        experts.

        The number of ranks is a multiple of both.
        """
        replica, rank = divmod(self.rank, slices)
        return Shard(rank, slices, self.group, replica, self.size // slices, expert_runs)

    @property
    def everyone(self) -> Shard:
        """Return this rank among all ranks, whatever their slices."""
        return Shard(self.replica * self.size + self.rank, self.size * self.replicas, self.group)

    @property
    def experts(self) -> tuple[Shard, Shard]:
        """Return this rank's run of experts, and its slice of each expert's width.

        Both are without collectives.
        """
        everyone = self.everyone
        slices = everyone.size // self.expert_runs
        run, part = divmod(everyone.rank, slices)
        return Shard(run, self.expert_runs), Shard(part, slices)

    def divide(self, n: int, what: str) -> int:
        """Return this rank's share of `n` things.

        Raises ConfigError for a remainder. `what` names the things.
        """
        if n % self.size:
            raise ConfigError(
                f"--tp-size {self.size}: {n} {what} cannot be divided among {self.size} ranks"
            )
        return n // self.size

    def over(self, n: int) -> Shard:
        """Return the shard for `n` things.

        With fewer things than ranks, neighbouring ranks hold the same thing. Such a shard is
        without collectives.
        """
        return self if n >= self.size else Shard(self.rank * n // self.size, n)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over slices. `x` may be overwritten."""
        if self.group is None or self.size == 1:
            return x
        total = self.group.all_reduce(x)
        # Each slice was counted as often as it is held.
        return total if self.replicas == 1 else total.div_(self.replicas)

    def sum_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks of disjoint parts. `x` may be overwritten."""
        if self.group is None or self.size * self.replicas == 1:
            return x
        return self.group.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every slice's `x` in rank order, [size, *x.shape]."""
        if self.group is None or self.size == 1:
            return x.unsqueeze(0)
        return self.group.all_gather(x)[: self.size]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's `x`. On other ranks `x` may be overwritten."""
        return x if self.group is None else self.group.broadcast(x)


UNSHARDED = Shard()
