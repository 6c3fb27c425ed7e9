"""FP8 (e4m3: four bits of exponent, three of mantissa): what it holds, and how values become it.

Owns nothing. PyTorch has no index_copy_ of such tensors: it is done with their bytes.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value, of either sign. What is beyond becomes it: the format has no infinity."""


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """x / scale, rounded to the nearest."""
    wide = x.float()
    return wide.div(scale).clamp_(-LARGEST, LARGEST).to(FP8)


def put_rows(kept: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    """kept[places] = rows, in the dtype of `kept`; divided by `scale` where that is FP8."""
    if kept.dtype == FP8:
        kept.view(torch.uint8).index_copy_(0, places, to_fp8(rows, scale).view(torch.uint8))
    else:
        kept.index_copy_(0, places, rows)
