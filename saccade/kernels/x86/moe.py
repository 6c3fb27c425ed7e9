"""The experts of a few rows in bfloat16 on CPUs, in two passes over their matrices: gates and gated
values, then the way down, summed.

A oneDNN product takes 14 us beside its work, and a step has hundreds for experts: these passes read
the memory packed by oneDNN, and make all products of a layer at once. Sums are in float32.

Imported only where needed (`ops.X86Ops`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numba
import numpy as np
import torch

from saccade.kernels.reference.moe import Addresses
from saccade.kernels.x86.jit import Kernel, claim, exponential, fetch, longs, real, reals, words
from saccade.kernels.x86.onednn_blocks import panel_width

PAIRS = 4
"""Pairs of inputs that are multiplied between two visits to the sums."""
AHEAD_BYTES = 8192
"""Reading is so far ahead of work (measured: decision 011)."""
LONG = 8
"""Bytes of an address."""


def read_width(up: Sequence[int], down: Sequence[int]) -> int:
    """Return how many outputs a panel has in experts' matrices with these shapes.

    Returns 0 if they lie otherwise than this file expects.
    """
    width = panel_width(*up)
    if not width or panel_width(*down) != width or down[1] % width or up[1] % (2 * PAIRS):
        return 0
    return width


@numba.njit(inline="always")
def _add_panel(size, matrix, pairs, x, sources, out, targets, column, first, last):
    """Add `panel @ x[sources[v] ...]` to `out[targets[v] + column ...]` for visits v.

    A visit makes `size` values. The panel's memory begins at `matrix`.
    """
    panel = words(matrix)
    for pair in range(0, pairs, 4):
        at = pair * size
        for line in range(size // 4):
            fetch(matrix + 4 * at + AHEAD_BYTES + 64 * line)
        for v in range(first, last):
            s, t = sources[v] + 2 * pair, targets[v] + column
            x0, x1, x2, x3 = x[s], x[s + 1], x[s + 2], x[s + 3]
            x4, x5, x6, x7 = x[s + 4], x[s + 5], x[s + 6], x[s + 7]
            for o in range(size):
                w0 = np.uint32(panel[at + o])
                w1 = np.uint32(panel[at + size + o])
                w2 = np.uint32(panel[at + 2 * size + o])
                w3 = np.uint32(panel[at + 3 * size + o])
                out[t + o] += (
                    real(w0 << np.uint32(16)) * x0
                    + real(w0 & np.uint32(0xFFFF0000)) * x1
                    + real(w1 << np.uint32(16)) * x2
                    + real(w1 & np.uint32(0xFFFF0000)) * x3
                    + real(w2 << np.uint32(16)) * x4
                    + real(w2 & np.uint32(0xFFFF0000)) * x5
                    + real(w3 << np.uint32(16)) * x6
                    + real(w3 & np.uint32(0xFFFF0000)) * x7
                )


@cache
def _gated(outs: int) -> Kernel:
    """Compile the kernel. An item is a panel of an expert's gates, and its panel of gated values.

    outs: outputs per panel.
    """

    def gated(block):
        x, gates, ups, shares = (
            reals(block[2]),
            reals(block[3]),
            reals(block[4]),
            reals(block[5]),
        )
        matrices, starts, sources, targets = (
            longs(block[6]),
            longs(block[7]),
            longs(block[8]),
            longs(block[9]),
        )
        inputs, width = block[10], block[11]
        panels, size = width // outs, 2 * outs * inputs  # bytes of a panel
        while True:
            item = claim(block)
            if item >= block[1]:
                return
            run, panel = item // panels, item % panels
            first, last, column = starts[run], starts[run + 1], panel * outs
            gate = matrices[run] + panel * size
            up = matrices[run] + (panels + panel) * size
            for v in range(first, last):
                for o in range(outs):
                    gates[targets[v] + column + o] = np.float32(0)
                    ups[targets[v] + column + o] = np.float32(0)
            _add_panel(outs, gate, inputs // 2, x, sources, gates, targets, column, first, last)
            _add_panel(outs, up, inputs // 2, x, sources, ups, targets, column, first, last)
            for v in range(first, last):
                at = targets[v] + column
                for o in range(outs):
                    g = gates[at + o]
                    gates[at + o] = g / (np.float32(1) + exponential(-g)) * ups[at + o] * shares[v]

    return Kernel(gated)


@cache
def _down(outs: int) -> Kernel:
    """Compile the kernel. An item is a panel with `outs` outputs, for all experts one after
    another.
    """

    def down(block):
        gated, out = reals(block[2]), reals(block[3])
        matrices, starts, sources, targets = (
            longs(block[4]),
            longs(block[5]),
            longs(block[6]),
            longs(block[7]),
        )
        runs, width = block[8], block[9]
        while True:
            panel = claim(block)
            if panel >= block[1]:
                return
            for run in range(runs):
                matrix = matrices[run] + panel * 2 * outs * width
                first, last = starts[run], starts[run + 1]
                _add_panel(
                    outs,
                    matrix,
                    width // 2,
                    gated,
                    sources,
                    out,
                    targets,
                    panel * outs,
                    first,
                    last,
                )

    return Kernel(down)


def compiled_experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    order: Sequence[int],
    runs: Sequence[tuple[int, int]],
    places: Addresses,
) -> torch.Tensor:
    """Sum SiLU-gated experts [T, H] for rows x [T, H], by shares [T, K].

    order: among the T K pairs of row and expert, by expert, those for this rank's experts. runs:
    (expert, number of pairs), one after another.
    """
    width = places.width
    outs = places.panel
    hidden, top, count = x.shape[1], shares.shape[1], len(order)
    starts = [0]
    for _, rows in runs:
        starts.append(starts[-1] + rows)
    rows_at = [place // top * hidden for place in order]
    inner_at = [visit * width for visit in range(count)]
    up, down = ([each[expert] for expert, _ in runs] for each in (places.up, places.down))
    table = torch.tensor([*up, *down, *starts, *rows_at, *inner_at])
    ups_at = table.data_ptr()
    downs_at = ups_at + LONG * len(runs)
    starts_at = downs_at + LONG * len(runs)
    rows_table = starts_at + LONG * len(starts)
    inner_table = rows_table + LONG * count
    wide = x.float().contiguous()
    parts = shares.flatten().float().index_select(0, torch.tensor(order, dtype=torch.int64))
    inner = torch.empty((2, count, width))
    out = torch.zeros_like(wide)
    _gated(outs)(
        len(runs) * (width // outs),
        2 * len(runs) * width * hidden,
        wide.data_ptr(),
        inner.data_ptr(),
        inner.data_ptr() + inner.element_size() * count * width,
        parts.data_ptr(),
        ups_at,
        starts_at,
        rows_table,
        inner_table,
        hidden,
        width,
    )
    _down(outs)(
        hidden // outs,
        len(runs) * width * hidden,
        inner.data_ptr(),
        out.data_ptr(),
        downs_at,
        starts_at,
        inner_table,
        rows_table,
        len(runs),
        width,
    )
    return out.to(x.dtype)
