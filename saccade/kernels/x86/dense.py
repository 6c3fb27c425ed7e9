"""Products of few rows with bfloat16 matrices by AMX, from the memory that oneDNN has packed:
oneDNN itself reads that memory at half the speed (decision 007).

A row has the same bits in any batch up to `MOST_ROWS`, and on any count of threads. The
instructions are `dense_code.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from saccade.kernels.x86.amx import has_amx, tile_setting
from saccade.kernels.x86.dense_call import MOST_ROWS, NAMES, PANEL, TILE_INPUTS, TILE_ROWS, Call
from saccade.kernels.x86.jit_cache import run_on_threads
from saccade.kernels.x86.machine_code import Function, compiled, source_text
from saccade.kernels.x86.onednn_blocks import address, panel_width


@cache
def functions() -> Mapping[str, Function]:
    """Return the functions by name. Made once a process.

    The first time on a machine takes part of a second; later they are read from disk.
    """

    def assembly(triple: str) -> str:
        from saccade.kernels.x86 import dense_code  # brings llvmlite, which only compiling needs

        return dense_code.assembly(triple)

    sources = map(source_text, ("dense", "dense_call", "llvm", "dense_code"))
    return compiled(NAMES, assembly, "\n".join((*NAMES, *sources)))


def multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if `few_rows_linear` takes these."""
    return (
        weight.is_mkldnn
        and x.dtype == torch.bfloat16
        and x.dim() == 2
        and 0 < len(x) <= MOST_ROWS
        and x.shape[1] % TILE_INPUTS == 0
        and has_amx("amx-bf16")
        and panel_width(*weight.shape) == PANEL
    )


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, [T, out] in bfloat16, for x [T, in]."""
    x = x.contiguous()
    count, (outputs, inputs) = len(x), weight.shape
    result = torch.empty(count, outputs, dtype=x.dtype)
    added = _zeros(outputs) if bias is None else bias.float()
    said = Call(
        0,
        outputs // PANEL,
        inputs,
        count,
        x.data_ptr(),
        address(weight),
        added.data_ptr(),
        result.data_ptr(),
        tile_setting(count).data_ptr(),
    )
    name = "rows_of_a_tile" if count <= TILE_ROWS else "rows_of_two"
    run_on_threads(functions()[name], said, outputs // PANEL)
    return result


@cache
def _zeros(outputs: int) -> torch.Tensor:
    return torch.zeros(outputs)
