"""Tensor parallelism: which slice of the model this process computes.

Layers receive a `Shard` when they are constructed, and call its collectives where results of
several ranks must be combined. No other code depends on ranks. The plugin `parallel` has the
transports between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.errors import ConfigError


class PeerLost(Exception):
    """A collective failed because another rank has exited or cannot be reached."""


class Collectives(Protocol):
    """Collective operations between ranks.

    Every rank must make the same calls in the same order, with tensors of the same shape. The
    results are bit-identical on every rank. They are on the tensor's device and, on CUDA, in stream
    order.

    Raises PeerLost if another rank has exited. The shared memory implementation does not detect
    this, so the process that supervises the ranks must stop all of them.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks. `x` must be contiguous, and may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of all ranks in rank order, [size, *x.shape]. `x` must be contiguous."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of rank 0 on every rank.

        `x` must be contiguous. On other ranks, it is overwritten.
        """
        ...

    def leave(self) -> None:
        """Disconnect from the other ranks at shutdown."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice `rank` of the model, which is split into `size` slices.

    If there are more ranks than slices, several ranks hold the same slice.
    """

    rank: int = 0
    size: int = 1
    # None for a single rank, or if the shard needs no communication
    group: Collectives | None = None
    replica: int = 0  # index of this rank among those with the same slice
    replicas: int = 1  # number of ranks with the same slice
    expert_runs: int = 1  # number of groups of whole experts over all ranks

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and 0 <= self.replica < self.replicas
        assert self.size * self.replicas % self.expert_runs == 0

    def spread(self, slices: int, expert_runs: int) -> Shard:
        """Return the shard of this rank for a model that is split into `slices` slices, with its
        experts divided into `expert_runs` groups.

        The total number of ranks must be a multiple of both.
        """
        replica, rank = divmod(self.rank, slices)
        return Shard(rank, slices, self.group, replica, self.size // slices, expert_runs)

    @property
    def everyone(self) -> Shard:
        """The shard that this rank would have if all ranks held different slices."""
        return Shard(self.replica * self.size + self.rank, self.size * self.replicas, self.group)

    @property
    def experts(self) -> tuple[Shard, Shard]:
        """Two shards: the group of experts that this rank holds, and its slice of each expert's
        intermediate size.

        Neither of them has collectives.
        """
        everyone = self.everyone
        slices = everyone.size // self.expert_runs
        run, part = divmod(everyone.rank, slices)
        return Shard(run, self.expert_runs), Shard(part, slices)

    def divide(self, n: int, what: str) -> int:
        """Return `n` divided by the number of slices.

        what: the plural noun for the error message. Raises ConfigError if `n` is not divisible.
        """
        if n % self.size:
            raise ConfigError(
                f"--tp-size {self.size}: {n} {what} cannot be divided among {self.size} ranks"
            )
        return n // self.size

    def over(self, n: int) -> Shard:
        """Return the shard for a dimension of `n` items, such as key/value heads.

        If there are fewer items than slices, neighboring ranks hold the same item, and the shard
        has no collectives.
        """
        return self if n >= self.size else Shard(self.rank * n // self.size, n)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the slices. `x` may be overwritten."""
        if self.group is None or self.size == 1:
            return x
        total = self.group.all_reduce(x)
        # The sum includes each slice once per replica.
        return total if self.replicas == 1 else total.div_(self.replicas)

    def sum_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks, each of which has computed a different part. `x`
        may be overwritten.
        """
        if self.group is None or self.size * self.replicas == 1:
            return x
        return self.group.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of all slices in order, [size, *x.shape]."""
        if self.group is None or self.size == 1:
            return x.unsqueeze(0)
        return self.group.all_gather(x)[: self.size]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of rank 0. On other ranks, `x` may be overwritten."""
        return x if self.group is None else self.group.broadcast(x)


UNSHARDED = Shard()
