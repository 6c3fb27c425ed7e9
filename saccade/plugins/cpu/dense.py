"""Batch-invariant bfloat16 GEMM on weights packed in panels of 32 outputs, with AMX or AVX512-BF16.

A row's results are bit-identical for any batch and any number of threads. (oneDNN's are not: it
chooses the reduction order by both.) `dense_code.py` emits the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import DenseMatrix, MatmulOps, Matrix, Rows, whole_rows
from saccade.kernels.processor import has_bf16
from saccade.plugins.cpu.amx import has_amx, tile_setting
from saccade.plugins.cpu.dense_call import BLOCK, NAME, PANEL, TILE_INPUTS, Call
from saccade.plugins.cpu.kernel import run_on_threads
from saccade.plugins.cpu.machine_code import Function, compiled
from saccade.plugins.cpu.panels import empty_words, padded_bias, portions_of

PORTION_VALUES = 5 << 17
"""Number of input values in a work block. Most of them stay in L2 while all panels are multiplied
(measured: decision 007).
"""
MIN_ROWS = 2 * BLOCK
"""Minimum number of rows in a work block. Smaller blocks would read the matrix more often."""


@cache
def gemm_function(tiled: bool) -> Function:
    """Return the compiled GEMM. Its code is cached on disk.

    tiled: whether to use AMX instead of AVX512.
    """
    return compiled((NAME,), "dense_code", ("dense_call", "llvm"), tiled)[NAME]


@dataclass(frozen=True, slots=True, eq=False)
class DensePanels(Matrix):
    """A DenseMatrix whose weights are packed in panels."""

    words: (
        torch.Tensor
    )  # int32 [panels, inputs / 2, PANEL], zero-padded: two inputs of one output each
    outputs: int  # without padding
    inputs: int  # without padding

    def multiply(
        self, _ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return gemm(whole_rows(x), self, bias)

    def dense(self) -> torch.Tensor:
        rows = self.words.transpose(1, 2).contiguous().view(torch.bfloat16)
        return rows.flatten(0, 1)[: self.outputs, : self.inputs].contiguous()


def can_prepack(weight: torch.Tensor) -> bool:
    """Return True if `prepack` supports this matrix."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_bf16()


def prepack(matrix: DenseMatrix) -> DensePanels:
    """Pack a matrix's weights into panels."""
    # Compile now, so that an error stops the server at start-up, and not at the first request.
    gemm_function(_tiled())
    outputs, inputs = matrix.values.shape
    panels, more = -(-outputs // PANEL), -inputs % TILE_INPUTS
    words = empty_words(panels, (inputs + more) // 2, PANEL)
    for first, count in portions_of(panels, PANEL * (inputs + more)):
        rows = matrix.values[first * PANEL : (first + count) * PANEL]
        padded = F.pad(rows, (0, more, 0, count * PANEL - len(rows))).contiguous()
        pairs = padded.view(torch.int32).view(count, PANEL, words.shape[1])
        words[first : first + count] = pairs.transpose(1, 2)
    return DensePanels(words, outputs, inputs)


def gemm(x: torch.Tensor, matrix: DensePanels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ matrix.T + bias`, [..., out] in bfloat16, for x [..., in] in bfloat16."""
    assert x.dtype == torch.bfloat16 and x.shape[-1] == matrix.inputs, "out-of-bounds read"
    assert bias is None or bias.shape == (matrix.outputs,), "out-of-bounds read"
    panels, lines, _ = matrix.words.shape
    inputs, shape = 2 * lines, x.shape[:-1]
    x = F.pad(x, (0, inputs - matrix.inputs)) if inputs > matrix.inputs else x.contiguous()
    result = torch.empty(*shape, matrix.outputs, dtype=x.dtype)
    if not (count := x.numel() // inputs):
        return result
    added = padded_bias(bias, panels * PANEL)
    portions = -(-count // max(MIN_ROWS, PORTION_VALUES // inputs))
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
    run_on_threads(gemm_function(_tiled()), call, panels * portions)
    return result


def _tiled() -> bool:
    return has_amx("amx-bf16")
