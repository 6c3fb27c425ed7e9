"""The rows in a step with finite values: a damaged weight or embedding, or too narrow a dtype, ends
the affected requests alone.

Knows tensors only.
"""

from __future__ import annotations

import torch

NO_TOKEN = -1
"""Told instead of a token where none could be drawn."""


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of `values` [R, N] are finite throughout, [R] bool.

    One pass is enough, since a sum is finite only with finite terms.
    """
    return values.sum(dim=-1, dtype=torch.float32).isfinite()


def quieten(logits: torch.Tensor) -> torch.Tensor:
    """Return `finite_rows`, and write zeros into all other rows of `logits` [D, V].

    Kernels that draw expect numbers.
    """
    finite = finite_rows(logits)  # [D]
    if logits.is_cuda or not bool(finite.all()):  # a look from the host would wait for a GPU
        logits.masked_fill_(~finite.unsqueeze(1), 0.0)
    return finite
