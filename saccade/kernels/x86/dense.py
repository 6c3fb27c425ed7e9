"""Products with bfloat16 matrices in panels of 32 outputs, by AMX or AVX512-BF16.

oneDNN chooses how it adds up by the count of rows and of threads, so that a row has other bits in
other company. Here it has the same bits in any batch, and on any count of threads. The instructions
are `dense_code.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import DenseMatrix, Matrix, Products, Rows, whole_rows
from saccade.kernels.processor import has_bf16
from saccade.kernels.x86.amx import has_amx, tile_setting
from saccade.kernels.x86.dense_call import BLOCK, NAME, PANEL, TILE_INPUTS, Call
from saccade.kernels.x86.jit_cache import run_on_threads
from saccade.kernels.x86.machine_code import Function, compiled
from saccade.kernels.x86.panels import empty_words, padded_bias, portions_of

PIECE_VALUES = 5 << 17
"""Values of a piece's rows, which a core's second cache holds for the most part while all panels
pass (measured: decision 007).
"""
LEAST_ROWS = 2 * BLOCK
"""Least rows of a piece: fewer would read the matrix too often."""


@cache
def product(tiled: bool) -> Function:
    """Return the function. Made once a process. tiled: by AMX.

    The first time on a machine takes part of a second; later it is read from disk.
    """
    return compiled((NAME,), "dense_code", ("dense_call", "llvm"), tiled)[NAME]


@dataclass(frozen=True, slots=True, eq=False)
class DensePanels(Matrix):
    """A ready DenseMatrix, in panels.

    words: int32 [panels, inputs / 2, PANEL], padded with zeros to whole panels and tiles. A word
    has the numbers for two inputs of an output. outputs, inputs: without padding.
    """

    words: torch.Tensor
    outputs: int
    inputs: int

    def multiply(
        self, _ops: Products, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return dense_product(whole_rows(x), self, bias)

    def dense(self) -> torch.Tensor:
        rows = self.words.transpose(1, 2).contiguous().view(torch.bfloat16)
        return rows.flatten(0, 1)[: self.outputs, : self.inputs].contiguous()


def lays_out(weight: torch.Tensor) -> bool:
    """Return True if `lay_out` takes this matrix."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_bf16()


def lay_out(matrix: DenseMatrix) -> DensePanels:
    """Put a matrix's values into panels."""
    product(_tiled())  # where it cannot be made, loading fails, not the first request
    outputs, inputs = matrix.values.shape
    panels, more = -(-outputs // PANEL), -inputs % TILE_INPUTS
    words = empty_words(panels, (inputs + more) // 2, PANEL)
    for first, count in portions_of(panels, PANEL * (inputs + more)):
        rows = matrix.values[first * PANEL : (first + count) * PANEL]
        padded = F.pad(rows, (0, more, 0, count * PANEL - len(rows))).contiguous()
        pairs = padded.view(torch.int32).view(count, PANEL, words.shape[1])
        words[first : first + count] = pairs.transpose(1, 2)
    return DensePanels(words, outputs, inputs)


def dense_product(
    x: torch.Tensor, matrix: DensePanels, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ matrix.T + bias`, [..., out] in bfloat16, for x [..., in] in bfloat16."""
    assert x.dtype == torch.bfloat16 and x.shape[-1] == matrix.inputs, "other memory would be read"
    assert bias is None or bias.shape == (matrix.outputs,), "other memory would be read"
    panels, lines, _ = matrix.words.shape
    inputs, shape = 2 * lines, x.shape[:-1]
    x = F.pad(x, (0, inputs - matrix.inputs)) if inputs > matrix.inputs else x.contiguous()
    result = torch.empty(*shape, matrix.outputs, dtype=x.dtype)
    if not (count := x.numel() // inputs):
        return result
    added = padded_bias(bias, panels * PANEL)
    portions = -(-count // max(LEAST_ROWS, PIECE_VALUES // inputs))
    portion = -(-count // (portions * BLOCK)) * BLOCK
    first, last = tile_setting(min(count, BLOCK)), tile_setting(count % BLOCK or BLOCK)
    call = Call(
        0,
        panels,
        inputs,
        matrix.outputs,
        count,
        portion,
        -(-count // portion),
        x.data_ptr(),
        matrix.words.data_ptr(),
        added.data_ptr(),
        result.data_ptr(),
        first.data_ptr(),
        last.data_ptr(),
    )
    run_on_threads(product(_tiled()), call, panels * portions)
    return result


def _tiled() -> bool:
    return has_amx("amx-bf16")
