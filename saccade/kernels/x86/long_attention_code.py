"""The instructions of `long_attention.py`'s kernel, compiled by Numba when a machine first asks for
them (`kernel_object.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from saccade.kernels.x86.jit import claim, exponential, halves, narrow, reals
from saccade.kernels.x86.kernel_object import Body


def weigh() -> Body:
    """Return the kernel's body. An item is a row."""

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

    return weigh
