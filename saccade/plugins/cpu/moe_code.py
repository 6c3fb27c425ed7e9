"""Numba code of the kernels of `moe.py`, compiled at first use (`kernel_object.py`). Each function
returns the body of a kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.plugins.cpu.dense_call import PANEL
from saccade.plugins.cpu.jit import (
    bits_to_f32,
    exponential,
    float32_ptr,
    int32_ptr,
    int64_ptr,
    next_item,
    prefetch,
)
from saccade.plugins.cpu.kernel_object import Body

PREFETCH_BYTES = 8192
"""Prefetch distance in bytes (measured: decision 011)."""


@numba.njit(inline="always")
def _add_panel(matrix, pairs, x, sources, out, targets, column, first, last):
    """For each (token, expert) pair v from `first` to `last`, multiply a panel with the values of x
    from sources[v] on, and add the PANEL results to out from targets[v] + column on.

    matrix: the panel's address.
    pairs: half the number of inputs.
    """
    panel = int32_ptr(matrix)
    for pair in range(0, pairs, 4):
        at = pair * PANEL
        for line in range(PANEL // 4):
            prefetch(matrix + 4 * at + PREFETCH_BYTES + 64 * line)
        for v in range(first, last):
            s, t = sources[v] + 2 * pair, targets[v] + column
            x0, x1, x2, x3 = x[s], x[s + 1], x[s + 2], x[s + 3]
            x4, x5, x6, x7 = x[s + 4], x[s + 5], x[s + 6], x[s + 7]
            for o in range(PANEL):
                w0 = np.uint32(panel[at + o])
                w1 = np.uint32(panel[at + PANEL + o])
                w2 = np.uint32(panel[at + 2 * PANEL + o])
                w3 = np.uint32(panel[at + 3 * PANEL + o])
                out[t + o] += (
                    bits_to_f32(w0 << np.uint32(16)) * x0
                    + bits_to_f32(w0 & np.uint32(0xFFFF0000)) * x1
                    + bits_to_f32(w1 << np.uint32(16)) * x2
                    + bits_to_f32(w1 & np.uint32(0xFFFF0000)) * x3
                    + bits_to_f32(w2 << np.uint32(16)) * x4
                    + bits_to_f32(w2 & np.uint32(0xFFFF0000)) * x5
                    + bits_to_f32(w3 << np.uint32(16)) * x6
                    + bits_to_f32(w3 & np.uint32(0xFFFF0000)) * x7
                )


def gated() -> Body:
    """Return the body of the first kernel. One work item is one panel of an expert's gate
    projection, and the matching panel of its up projection.
    """

    def gated(block):
        x, gates, ups, shares = (
            float32_ptr(block[2]),
            float32_ptr(block[3]),
            float32_ptr(block[4]),
            float32_ptr(block[5]),
        )
        matrices, starts, sources, targets = (
            int64_ptr(block[6]),
            int64_ptr(block[7]),
            int64_ptr(block[8]),
            int64_ptr(block[9]),
        )
        inputs, width = block[10], block[11]
        panels, size = width // PANEL, 2 * PANEL * inputs  # bytes of a panel
        while True:
            item = next_item(block)
            if item >= block[1]:
                return
            run, panel = item // panels, item % panels
            first, last, column = starts[run], starts[run + 1], panel * PANEL
            gate = matrices[run] + panel * size
            up = matrices[run] + (panels + panel) * size
            for v in range(first, last):
                for o in range(PANEL):
                    gates[targets[v] + column + o] = np.float32(0)
                    ups[targets[v] + column + o] = np.float32(0)
            _add_panel(gate, inputs // 2, x, sources, gates, targets, column, first, last)
            _add_panel(up, inputs // 2, x, sources, ups, targets, column, first, last)
            for v in range(first, last):
                at = targets[v] + column
                for o in range(PANEL):
                    g = gates[at + o]
                    gates[at + o] = g / (np.float32(1) + exponential(-g)) * ups[at + o] * shares[v]

    return gated


def down() -> Body:
    """Return the body of the second kernel. One work item is one panel of outputs, for all experts
    in order.
    """

    def down(block):
        gated, out = float32_ptr(block[2]), float32_ptr(block[3])
        matrices, starts, sources, targets = (
            int64_ptr(block[4]),
            int64_ptr(block[5]),
            int64_ptr(block[6]),
            int64_ptr(block[7]),
        )
        runs, width = block[8], block[9]
        while True:
            panel = next_item(block)
            if panel >= block[1]:
                return
            for run in range(runs):
                matrix = matrices[run] + panel * 2 * PANEL * width
                first, last = starts[run], starts[run + 1]
                _add_panel(
                    matrix,
                    width // 2,
                    gated,
                    sources,
                    out,
                    targets,
                    panel * PANEL,
                    first,
                    last,
                )

    return down
