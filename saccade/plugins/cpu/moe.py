"""Computes small-batch MoE in bfloat16 on CPUs, in two passes over the experts' weights: first the
gate and up projections, then the summed down projection.

A GEMM call has an overhead of 14 us, and a step would need hundreds of calls for its experts. Here,
each pass handles all experts of a layer in one call, and accumulates in float32.

Imported only if used (`ops.X86Ops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from saccade.kernels.matrix import Matrix
from saccade.kernels.reference.moe import Addresses
from saccade.plugins.cpu.dense import DensePanels
from saccade.plugins.cpu.dense_call import PANEL
from saccade.plugins.cpu.kernel import Kernel

ADDRESS_BYTES = 8


def locate(up: Sequence[Matrix], down: Sequence[Matrix]) -> Addresses | None:
    """Return the addresses of the experts' weights, or `None` if their layout is not supported."""
    ups, downs = (
        [matrix for matrix in matrices if isinstance(matrix, DensePanels)]
        for matrices in (up, down)
    )
    if len(ups) < len(up) or len(downs) < len(down):
        return None
    sizes = ups[0].outputs, ups[0].inputs, downs[0].outputs, downs[0].inputs
    if any(size % PANEL for size in sizes):
        return None
    up_at, down_at = (tuple(each.words.data_ptr() for each in some) for some in (ups, downs))
    return Addresses(up_at, down_at, downs[0].inputs)


@cache
def _gated() -> Kernel:
    return Kernel("moe_code", "gated")


@cache
def _down() -> Kernel:
    return Kernel("moe_code", "down")


def compiled_experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    order: Sequence[int],
    runs: Sequence[tuple[int, int]],
    places: Addresses,
) -> torch.Tensor:
    """Sum SiLU-gated experts [T, H] for x [T, H], weighted by shares [T, K].

    order: indices into the flattened shares of this rank's (token, expert) pairs, sorted by expert.
    runs: (expert, number of the expert's pairs) in the same order.
    places: the addresses of the experts' weights.
    """
    width = places.width
    hidden, top, count = x.shape[1], shares.shape[1], len(order)
    starts = [0]
    for _, rows in runs:
        starts.append(starts[-1] + rows)
    rows_at = [place // top * hidden for place in order]
    inner_at = [visit * width for visit in range(count)]
    up, down = ([each[expert] for expert, _ in runs] for each in (places.up, places.down))
    table = torch.tensor([*up, *down, *starts, *rows_at, *inner_at])
    ups_at = table.data_ptr()
    downs_at = ups_at + ADDRESS_BYTES * len(runs)
    starts_at = downs_at + ADDRESS_BYTES * len(runs)
    rows_table = starts_at + ADDRESS_BYTES * len(starts)
    inner_table = rows_table + ADDRESS_BYTES * count
    wide = x.float().contiguous()
    parts = shares.flatten().float().index_select(0, torch.tensor(order, dtype=torch.int64))
    inner = torch.empty((2, count, width))
    out = torch.zeros_like(wide)
    _gated()(
        len(runs) * (width // PANEL),
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
    _down()(
        hidden // PANEL,
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
