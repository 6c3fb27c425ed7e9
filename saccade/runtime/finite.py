"""Which rows of a step have values that are numbers: a damaged weight or embedding, or a dtype that
is too narrow, ends the requests that meet it, and nothing else.

Knows tensors only.
"""

from __future__ import annotations

import torch

NO_TOKEN = -1
"""Told instead of a token where none could be drawn."""


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Which rows of `values` [R, N] are finite throughout, [R] bool: one pass, for a sum is finite
    only where all its terms are.
    """
    return values.sum(dim=-1, dtype=torch.float32).isfinite()


def quieten(logits: torch.Tensor) -> torch.Tensor:
    """`finite_rows`, and zeros in place of the other rows of `logits` [D, V]: no kernel that draws
    is built for what is no number.
    """
    finite = finite_rows(logits)  # [D]
    if logits.is_cuda or not bool(finite.all()):  # a look from the host would wait for a GPU
        logits.masked_fill_(~finite.unsqueeze(1), 0.0)
    return finite
