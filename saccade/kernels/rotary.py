"""Rotary position embedding, neox layout (the first half of a head is rotated with the second).

Owns nothing; works for any even head size. Positions come as ready tables, one row per token.
"""

from __future__ import annotations

import torch


def rotary_tables(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, 1, D] float32 from angles [T, D / 2]; `sin` carries the sign with which `apply_rotary` adds the other half."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of `x` [T, H, D]: queries and keys side by side, so that both take one call.

    cos, sin: [T, 1, D] from `rotary_tables`. Computed in float32; the result is a new tensor in the dtype of `x`.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
