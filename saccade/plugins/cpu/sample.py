"""Samples tokens for small batches with a compiled kernel. It finds the bounds of top-k, top-p and
min-p by bisection instead of sorting. If rounding could change the token, PyTorch samples it
(`reference/sample.py`).
"""

from __future__ import annotations

from functools import cache

import torch

from saccade.kernels.reference.sample import (
    MAX_SORTED,
    ROUNDING,
    UNLIKELY,
    Columns,
    SamplingRows,
    sample_with,
)
from saccade.plugins.cpu.kernel import Kernel, bits, bits_of
from saccade.plugins.cpu.numba_call import UNDECIDED


def compiled_sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Compute `reference.sample.sample`."""
    return sample_with(sample_row, logits, rows)


def sample_row(logits: torch.Tensor, columns: Columns, point: float) -> int | None:
    """Compute `reference.sample.sample_row`.

    Returns None if PyTorch must sample the token.
    """
    vocab = len(logits)
    factor, limit, share, floor = columns
    weights, kept, token = _scratch(vocab)
    _kernel()(
        1,
        vocab,
        logits.data_ptr(),
        weights.data_ptr(),
        token.data_ptr(),
        vocab,
        int(limit),
        *map(bits_of, (factor, share, floor, point, ROUNDING)),
        kept.data_ptr(),
        MAX_SORTED,
        bits(UNLIKELY),
    )
    sampled = int(token[0])
    return None if sampled == UNDECIDED else sampled


@cache
def _scratch(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(vocab), torch.empty(MAX_SORTED), torch.empty(1, dtype=torch.int64)


@cache
def _kernel() -> Kernel:
    return Kernel("sample_code", "sample")
