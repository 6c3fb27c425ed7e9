"""Adds LoRA adapters' results to a matmul: `scale * (x @ A.T) @ B.T` for the rows x of an adapter.

A batch may contain rows of more than one adapter, but a row has at most one. Small integers
(`place`) identify the adapters. `PackedPairs` is the layout for kernels that compute all adapters
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

AdapterRows = tuple[int, slice | torch.Tensor]
"""An adapter's `place`, and its batch rows: a slice, or int64 [n]."""
GROUP_ROWS = 16
"""Maximum rows of one adapter that a kernel computes together."""
ALIGNED = 16
PART_FIELDS = 4


class Groups(NamedTuple):
    """A batch's rows, grouped by adapter."""

    rows: torch.Tensor  # int64 [N]: the rows that have an adapter, sorted by adapter
    groups: torch.Tensor  # int32 [G, 3]: an adapter's place, its first index in `rows`, and length


class Present:
    """Which rows use which adapter in a forward pass."""

    __slots__ = ("_groups", "each")

    def __init__(self, each: tuple[AdapterRows, ...] = ()) -> None:
        self.each = each
        self._groups: dict[int, Groups] = {}

    def groups(self, rows: int, device: torch.device) -> Groups:
        """Return the rows grouped by adapter, for a matmul with this many rows.

        The result is cached for the pass.
        """
        if rows not in self._groups:
            found: list[torch.Tensor] = []
            groups: list[tuple[int, int, int]] = []
            first = 0
            for place, which in self.each:
                if isinstance(which, slice):
                    which = torch.arange(*which.indices(rows), device=device)
                found.append(which)
                for at in range(0, len(which), GROUP_ROWS):
                    groups.append((place, first + at, min(GROUP_ROWS, len(which) - at)))
                first += len(which)
            listed = torch.tensor(groups, dtype=torch.int32).view(-1, 3)
            self._groups[rows] = Groups(torch.cat(found), listed.to(device, non_blocking=True))
        return self._groups[rows]


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one adapter for one matmul.

    ups: (outputs, ranks, B [o, r]) for each part.
    """

    down: torch.Tensor  # [R, in]
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for _, _, up in self.ups)


class PackedPairs(NamedTuple):
    """The matrices of all adapters for one matmul, in two tensors."""

    downs: torch.Tensor  # [all ranks, in]
    ups: torch.Tensor  # each `up` transposed, its rows padded to a multiple of `ALIGNED` values
    # int64 [places, 2 + 4 * parts], with a row per adapter: its first row in `downs` and their
    # number, then for each part of the outputs: the first rank, their number, the offset in `ups`
    # and the row length there
    table: torch.Tensor
    parts: torch.Tensor  # int64 [parts, 2]: the first output, and the number of outputs
    ranks: int  # the maximum of all adapters


class Additions:
    """The matrices of all adapters for one matmul, by `place`.

    parts: slices of the matmul's outputs.
    """

    __slots__ = ("_packed", "pairs", "parts")

    def __init__(self, parts: Sequence[slice]) -> None:
        self.parts = tuple(parts)
        self.pairs: dict[int, Pair] = {}
        self._packed: PackedPairs | None = None

    @property
    def widest(self) -> int:
        """The number of outputs of the largest part."""
        return max(part.stop - part.start for part in self.parts)

    @property
    def even(self) -> bool:
        """True if all parts start and stop at multiples of `ALIGNED`."""
        return not any(part.start % ALIGNED or part.stop % ALIGNED for part in self.parts)

    def put(self, place: int, pair: Pair) -> None:
        self.pairs[place] = pair
        self._packed = None

    def drop(self, place: int) -> None:
        if self.pairs.pop(place, None) is not None:
            # The other pairs are views of a tensor that includes this one. Copy them to free it.
            self._packed = self._pack() if self._packed and self.pairs else None

    def packed(self) -> PackedPairs:
        """Return the packed matrices. After a change, they are packed again, and pairs become views
        of them.
        """
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> PackedPairs:
        downs = torch.cat([pair.down for pair in self.pairs.values()])
        table = torch.zeros(max(self.pairs) + 1, 2 + PART_FIELDS * len(self.parts)).long()
        lines: list[torch.Tensor] = []
        first = size = 0
        for place, pair in self.pairs.items():
            table[place, :2] = torch.tensor([first, len(pair.down)])
            first += len(pair.down)
            for outputs, its, up in pair.ups:
                line = F.pad(up.t(), (0, -len(up) % ALIGNED))
                at = 2 + PART_FIELDS * self.parts.index(outputs)
                told = [its.start, len(line), size, line.shape[1]]
                table[place, at : at + PART_FIELDS] = torch.tensor(told)
                lines.append(line.reshape(-1))
                size += line.numel()
        parts = torch.tensor([(part.start, part.stop - part.start) for part in self.parts])
        ups = torch.cat(lines)
        ranks = max(len(pair.down) for pair in self.pairs.values())
        self.pairs = self._views(downs, ups, table.tolist())
        device = downs.device
        return PackedPairs(downs, ups, table.to(device), parts.to(device), ranks)

    def _views(
        self, downs: torch.Tensor, ups: torch.Tensor, table: Sequence[Sequence[int]]
    ) -> dict[int, Pair]:
        found = {}
        for place, pair in self.pairs.items():
            first, count, *_ = line = table[place]
            views = []
            for outputs, ranks, up in pair.ups:
                at = 2 + PART_FIELDS * self.parts.index(outputs)
                _, rank, start, width = line[at : at + PART_FIELDS]
                whole = ups[start : start + rank * width].view(rank, width)
                views.append((outputs, ranks, whole[:, : len(up)].t()))
            found[place] = Pair(downs[first : first + count], tuple(views))
        return found


def add_low_rank(x: torch.Tensor, y: torch.Tensor, additions: Additions, present: Present) -> None:
    """Add the adapters' results for rows x [T, in] to the product y [T, out], in place."""
    for place, rows in present.each:
        if (pair := additions.pairs.get(place)) is None:
            continue
        inner = x[rows] @ pair.down.t()  # [n, R]
        for outputs, ranks, up in pair.ups:
            if isinstance(rows, slice):
                y[rows, outputs].addmm_(inner[:, ranks], up.t())
            else:
                y[:, outputs].index_add_(0, rows, inner[:, ranks] @ up.t())
