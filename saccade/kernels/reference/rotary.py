"""Rotary position embedding (RoPE), for any even head size and for partial rotation of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Pairs = Literal["halves", "neighbours"]
"""Which values are rotated together: i and i + R / 2 (as in GPT-NeoX), or 2 i and 2 i + 1."""

CPU_VALUES = 1 << 17
"""Values rotated at a time on a CPU, so that intermediate results stay in its cache."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of the first R values of each token's heads.

    Without `index`, row t of the tables belongs to token t. With `index` [A, T], token t uses row
    index[a, t], where a is axis[j] for the j-th of its R / 2 angles, or 0 without `axis`. Position
    axes (mRoPE) can thus share one table.

    cos, sin: tables [P, R] float32 from `rotary_tables`.
    """

    cos: torch.Tensor  # [P, R] float32
    sin: torch.Tensor  # [P, R] float32
    index: torch.Tensor | None = None  # [A, T] int64
    axis: torch.Tensor | None = None  # [R / 2] int64
    pairs: Pairs = "halves"

    def ready(self) -> Rotation:
        """Return the same rotation without `index`, with the table rows of all tokens looked up."""
        if self.index is None:
            return self
        if self.axis is None:
            cos, sin = (table.index_select(0, self.index[0]) for table in (self.cos, self.sin))
        else:
            axis = self.axis.repeat(2) if self.pairs == "halves" else self.axis.repeat_interleave(2)
            rows = self.index.t().index_select(1, axis)  # [T, R]
            cos, sin = self.cos.gather(0, rows), self.sin.gather(0, rows)
        return replace(self, cos=cos, sin=sin, index=None, axis=None)

    def part(self, rows: slice) -> Rotation:
        """Return the rotation of the tokens `rows`."""
        if self.index is None:
            return replace(self, cos=self.cos[rows], sin=self.sin[rows])
        return replace(self, index=self.index[:, rows])


def rotary_tables(
    angles: torch.Tensor, pairs: Pairs = "halves"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) [P, R] float32 for angles [P, R / 2].

    `sin` includes the sign with which the other value of the pair is added.
    """
    cos, sin = angles.cos(), angles.sin()
    if pairs == "halves":
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


def section_axes(sections: Sequence[int], *, interleaved: bool) -> torch.Tensor:
    """Return the axis of each of the sum(sections) angles (mRoPE), as int64.

    Contiguous (Qwen2-VL): the first `sections[0]` angles belong to axis 0, and so on. Interleaved
    (Qwen3-VL): 0 1 2 0 1 2 ... until the sections of axes 1 and 2 are used up, then axis 0.
    """
    if not interleaved:
        return torch.tensor([axis for axis, count in enumerate(sections) for _ in range(count)])
    axis = torch.zeros(sum(sections), dtype=torch.int64)
    for dim in range(1, len(sections)):
        axis[dim : len(sections) * sections[dim] : len(sections)] = dim
    return axis


def rotate_(rotation: Rotation, x: torch.Tensor) -> None:
    """Rotate heads [T, H, D] in place. Only their last dimension must be contiguous.

    This computes in float32 and rounds once.

    x: queries and keys, possibly a view of a larger tensor.
    """
    rotation = rotation.ready()
    size, halves = rotation.cos.shape[1], rotation.pairs == "halves"
    if size < x.shape[-1]:
        x = x[..., :size]
    step = max(1, CPU_VALUES // (x.shape[1] * size))
    if x.shape[0] <= step:
        _rotate_values(x, rotation.cos, rotation.sin, halves)
        return
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        _rotate_values(x[rows], rotation.cos[rows], rotation.sin[rows], halves)


def _rotate_values(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> None:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = x.float()
    partner = (
        wide.roll(x.shape[-1] // 2, -1)
        if halves
        else wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    )
    if wide is x:
        x.mul_(cos).addcmul_(partner, sin)
    else:
        x.copy_(wide.mul_(cos).addcmul_(partner, sin))
