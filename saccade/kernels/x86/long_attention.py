"""The softmax of float32 scores to bfloat16 weights, in two passes over each row while a core's
cache has it. Knows tensors only.

Imported only where it runs (`ops.X86Ops`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from saccade.kernels.x86.jit import Kernel, claim, exponential, halves, narrow, reals


@cache
def _weigh() -> Kernel:
    """Compile the kernel. An item is a row."""

    def weigh(block):
        scores, tops, weights, keys = reals(block[2]), reals(block[3]), halves(block[4]), block[5]
        row = claim(block)
        while row < block[1]:
            at, top, total = row * keys, tops[row], np.float32(0)
            for key in range(at, at + keys):
                each = exponential(scores[key] - top)
                scores[key] = each
                total += each
            share = np.float32(1) / total
            for key in range(at, at + keys):
                weights[key] = narrow(scores[key] * share)
            row = claim(block)

    return Kernel(weigh)


def softmax_to_bfloat16(scores: torch.Tensor) -> torch.Tensor:
    """Return softmax(scores [R, K]) in bfloat16. Overwrites `scores`, float32.

    What is -inf, or more than 87 below a row's largest, counts 1e-38 of it.
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
