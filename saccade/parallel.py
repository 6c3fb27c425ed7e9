"""Tensor and expert parallelism: which slice of the model this process has.

Layers get a `Shard` when they are created, and call its collectives where partial results must be
combined. `collectives.py` implements the collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.errors import ConfigError


class PeerLost(Exception):
    """Raised if a collective fails, because another rank has exited or is unreachable."""


class Collectives(Protocol):
    """Collective operations between ranks.

    All ranks must make the same calls in the same order, with tensors of the same shape. Results
    are bit-identical on all ranks. They are on the tensor's device, and on CUDA in stream order.

    Methods raise PeerLost if they detect that another rank has exited. `SharedMemory` cannot detect
    it, so the engine must stop this rank.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks. `x` must be contiguous, and may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` in rank order, [size, *x.shape]. `x` must be contiguous."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x` on all ranks. `x` must be contiguous, and is overwritten on the other
        ranks.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Which slice of the model a rank has.

    If there are more ranks than slices, several ranks (replicas) have the same slice.
    """

    rank: int = 0  # index of the slice
    size: int = 1  # number of slices
    group: Collectives | None = None  # `None` if there are no other ranks, or it is not needed
    replica: int = 0  # index of this rank among those with the same slice
    replicas: int = 1  # number of ranks with the same slice
    # Experts are divided into this many groups. Ranks of a group divide each of its experts.
    expert_runs: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and 0 <= self.replica < self.replicas
        assert self.size * self.replicas % self.expert_runs == 0

    def spread(self, slices: int, expert_runs: int) -> Shard:
        """Return this rank's shard if the model is divided into `slices` slices, and its experts
        into `expert_runs` groups. The number of ranks must be a multiple of both.
        """
        replica, rank = divmod(self.rank, slices)
        return Shard(rank, slices, self.group, replica, self.size // slices, expert_runs)

    @property
    def everyone(self) -> Shard:
        """This rank's index among all ranks, as a shard."""
        return Shard(self.replica * self.size + self.rank, self.size * self.replicas, self.group)

    @property
    def experts(self) -> tuple[Shard, Shard]:
        """This rank's group of experts, and its slice of each of these experts' width. Both have no
        collectives.
        """
        everyone = self.everyone
        slices = everyone.size // self.expert_runs
        run, part = divmod(everyone.rank, slices)
        return Shard(run, self.expert_runs), Shard(part, slices)

    def divide(self, n: int, what: str) -> int:
        """Return `n` divided by the number of slices.

        Raises ConfigError if it is not divisible. `what` is the plural of what is divided, for the
        message.
        """
        if n % self.size:
            raise ConfigError(
                f"--tp-size {self.size}: {n} {what} cannot be divided among {self.size} ranks"
            )
        return n // self.size

    def over(self, n: int) -> Shard:
        """Return the shard for dividing `n` items, such as key/value heads.

        If there are fewer items than slices, consecutive ranks have the same item. Such a shard has
        no collectives.
        """
        return self if n >= self.size else Shard(self.rank * n // self.size, n)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over slices. `x` may be overwritten."""
        if self.group is None or self.size == 1:
            return x
        total = self.group.all_reduce(x)
        # Replicas were added too.
        return total if self.replicas == 1 else total.div_(self.replicas)

    def sum_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks, including replicas, which have disjoint parts of
        it. `x` may be overwritten.
        """
        if self.group is None or self.size * self.replicas == 1:
            return x
        return self.group.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of all slices in order, [size, *x.shape]."""
        if self.group is None or self.size == 1:
            return x.unsqueeze(0)
        return self.group.all_gather(x)[: self.size]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of rank 0. On other ranks `x` may be overwritten."""
        return x if self.group is None else self.group.broadcast(x)


UNSHARDED = Shard()
