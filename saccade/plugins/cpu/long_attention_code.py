"""Numba code of the kernel of `long_attention.py`, compiled at first use (`kernel_object.py`)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from saccade.plugins.cpu.jit import exponential, f32_to_bf16, float32_ptr, next_item, uint16_ptr
from saccade.plugins.cpu.kernel_object import Body


def weigh() -> Body:
    """Return the kernel's body. One work item is one row."""

    def weigh(block):
        scores, tops, weights, keys = (
            float32_ptr(block[2]),
            float32_ptr(block[3]),
            uint16_ptr(block[4]),
            block[5],
        )
        row = next_item(block)
        while row < block[1]:
            at, top, total = row * keys, tops[row], np.float32(0)
            for key in range(at, at + keys):
                each = exponential(scores[key] - top)
                scores[key] = each
                total += each
            share = np.float32(1) / total
            for key in range(at, at + keys):
                weights[key] = f32_to_bf16(scores[key] * share)
            row = next_item(block)

    return weigh
