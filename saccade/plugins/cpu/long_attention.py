"""Computes the softmax of float32 scores as bfloat16 weights, in two passes over each row while the
row is in a core's cache.

Imported only if used (`attention.softmax`).
"""

from __future__ import annotations

from functools import cache

import torch

from saccade.plugins.cpu.kernel import Kernel


@cache
def _weigh() -> Kernel:
    return Kernel("long_attention_code", "weigh")


def softmax_to_bfloat16(scores: torch.Tensor) -> torch.Tensor:
    """Return softmax(scores [R, K]) in bfloat16. Overwrites `scores`, which are float32.

    Scores that are -inf, or more than 87 below the maximum of their row, get 1e-38 times the weight
    of the maximum.
    """
    rows, keys = scores.shape
    assert scores.is_contiguous()
    tops = scores.amax(-1)
    weights = torch.empty(scores.shape, dtype=torch.bfloat16)
    _weigh()(
        rows,
        2 * rows * keys,
        scores.data_ptr(),
        tops.data_ptr(),
        weights.data_ptr(),
        keys,
    )
    return weights
