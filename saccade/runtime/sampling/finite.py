"""The rows in a step with finite values: a damaged weight or embedding, or too narrow a dtype, ends
the affected requests alone.

Knows tensors only.
"""

from __future__ import annotations

from math import isfinite

import torch

NO_TOKEN = -1
"""Told instead of a token where none could be drawn."""


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return which rows of `values` [R, N] are finite throughout, [R] bool.

    One pass is enough, since a sum is finite only with finite terms.
    """
    return values.sum(dim=-1, dtype=torch.float32).isfinite()


def quieten(logits: torch.Tensor) -> torch.Tensor | None:
    """Return `finite_rows`, and write zeros into all other rows of `logits` [D, V].

    Returns `None` on a CPU if all are finite. Kernels that draw expect numbers.
    """
    if not logits.is_cuda and isfinite(logits.sum()):
        return None
    finite = finite_rows(logits)  # [D]
    logits.masked_fill_(~finite.unsqueeze(1), 0.0)  # a look from the host would wait for a GPU
    return finite
