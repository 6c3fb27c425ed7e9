"""Packs 4- and 8-bit weights in panels of 32 outputs, which kernels read sequentially, and calls
the kernels (`vnni.py`). Activations are quantized dynamically to int8, with a scale per row and
group.

Sums within a group are exact integers, and groups are added in order. So results are
batch-invariant, and do not depend on the number of threads.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import (
    Int4Matrix,
    Int8Matrix,
    MatmulOps,
    Matrix,
    Rows,
    bytes_of,
    whole_rows,
)
from saccade.kernels.reference.hadamard import MIN_BLOCK, block_of
from saccade.kernels.reference.int4 import ZERO_POINT, numbers_of
from saccade.kernels.reference.int8 import LARGEST, MIN_SCALE
from saccade.plugins.cpu.amx import has_amx, tile_setting
from saccade.plugins.cpu.panels import empty_words, padded_bias, portions_of
from saccade.plugins.cpu.vnni import run
from saccade.plugins.cpu.vnni_call import (
    LANES,
    PANEL_VECTORS,
    ROWS,
    TILE_INPUTS,
    TILE_PANELS,
    TILE_ROWS,
    ZERO,
)

PANEL = LANES * PANEL_VECTORS
"""Number of outputs that are packed together."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of `vnni_call.FORMATS`, in the same order."""
STEPS = {4: 32, 8: 16}
"""Inputs per iteration of the kernel's inner loop, by bits of the weights. Group sizes are
multiples of this.
"""
MIN_TILED = 32
"""Minimum batch size for AMX, which is no faster for fewer rows."""
MAX_SCALE_EXPONENT = 15
"""Scales are stored as float16 times a power of two, so that the largest is below 2 ** this."""
ONE_BITS = 0x3F800000
"""The bits of 1 in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Panels(Matrix):
    """An Int4Matrix whose weights are packed in panels."""

    # int32 [panels, inputs / 8, PANEL]. Byte j (0 to 3) of word i has the weight of input 8 i + j
    # in its lower 4 bits, and the weight of input 8 i + 4 + j in its upper 4 bits.
    words: torch.Tensor
    scales: torch.Tensor  # float16 [panels, groups, PANEL], times `unit`
    zeros: torch.Tensor  # zero points: float16 [panels, groups, PANEL]
    unit: float  # power of two by which all scales are multiplied
    group: int  # inputs per scale
    outputs: int  # without padding
    inputs: int  # without padding
    order: torch.Tensor | None = None  # order of the inputs, as in Int4Matrix

    @property
    def nbytes(self) -> int:
        return bytes_of(self.words, self.scales, self.zeros, self.order)

    def multiply(
        self, _ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return panels_linear(whole_rows(x), self, bias)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Panels(Int8Matrix):
    """An Int8Matrix whose weights are packed in panels, with values from `pack_bytes` and scales
    from `pad_scales`.
    """

    def ready(self, _ops: MatmulOps, /) -> Matrix:
        return self

    def multiply(
        self, _ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return bytes_linear(whole_rows(x), self, bias)

    def logits(self, _ops: MatmulOps, x: torch.Tensor, /) -> torch.Tensor:
        return bytes_linear(x, self, None, torch.float32)


def pack_panels(matrix: Int4Matrix) -> Int4Panels:
    """Pack `matrix`, which must be on the CPU, for `panels_linear`."""
    outputs = matrix.words.shape[0]
    # A matrix with a single group may have more padding than kernels need.
    group = min(matrix.group, -(-matrix.inputs // STEPS[4]) * STEPS[4])
    groups = -(-matrix.inputs // group)
    inputs = groups * group
    panels = -(-outputs // PANEL)
    words = empty_words(panels, inputs // 8, PANEL)
    for first, count in portions_of(panels, PANEL * inputs):
        rows = slice(first * PANEL, (first + count) * PANEL)
        numbers = numbers_of(replace(matrix, words=matrix.words[rows]))
        numbers = F.pad(numbers, (0, inputs - numbers.shape[1], 0, count * PANEL - len(numbers)))
        pairs = numbers.view(torch.int32).view(count, PANEL, inputs // 8, 2)
        words[first : first + count] = (pairs[..., 0] | pairs[..., 1] << 4).transpose(1, 2)
    scales = matrix.scales[:groups].float()
    unit = _unit(scales)
    zeros = torch.full_like(scales, ZERO_POINT) if matrix.zeros is None else matrix.zeros[:groups]
    return Int4Panels(
        words,
        _by_panels((scales / unit).half(), panels),
        _by_panels(zeros.half(), panels),
        unit,
        group,
        outputs,
        matrix.inputs,
        matrix.order,
    )


def _unit(scales: torch.Tensor) -> float:
    largest = float(scales.abs().amax()) if scales.numel() else 0.0
    return float(2.0 ** (math.frexp(largest)[1] - MAX_SCALE_EXPONENT)) if largest else 1.0


def _by_panels(values: torch.Tensor, panels: int) -> torch.Tensor:
    groups, outputs = values.shape
    padded = F.pad(values, (0, panels * PANEL - outputs))
    return padded.view(groups, panels, PANEL).transpose(0, 1).contiguous()


def pack_int8(matrix: Int8Matrix) -> Int8Panels:
    """Pack `matrix`, which must be on the CPU and have at least one input, in panels."""
    words, scales = pack_bytes(matrix.values), pad_scales(matrix.scales)
    return Int8Panels(words, scales, matrix.transformed)


def pack_bytes(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 [out, in] in panels: int32 [panels, in / 4, PANEL].

    Values are stored as unsigned bytes with the zero point `ZERO`. Inputs are padded to a multiple
    of those that a kernel multiplies at a time.
    """
    step = TILE_INPUTS if has_amx("amx-int8") else STEPS[8]
    values = F.pad(values, (0, -values.shape[1] % step))
    outputs, inputs = values.shape
    panels = -(-outputs // PANEL)
    words = empty_words(panels, inputs // 4, PANEL)
    for first, count in portions_of(panels, PANEL * inputs):
        rows = values[first * PANEL : (first + count) * PANEL].contiguous()
        padded = F.pad(rows, (0, 0, 0, count * PANEL - len(rows)))
        each = padded.view(torch.int32).view(count, PANEL, inputs // 4)
        words[first : first + count] = each.transpose(1, 2)
    words.view(torch.uint8).bitwise_xor_(ZERO)
    return words


def pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as float32 [out], in memory that extends to a multiple of PANEL outputs."""
    padded = F.pad(scales.float(), (0, -len(scales) % PANEL))
    return padded[: len(scales)]


def quantise_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a Hadamard transform to each output of `weight` [out, in], and quantize it to int8.

    Returns int8 [out, inputs padded to a multiple of MIN_BLOCK], and float32 scales [out]. Uses
    PyTorch's threads.
    """
    weight = F.pad(weight, (0, -weight.shape[1] % MIN_BLOCK)).contiguous()
    if weight.dtype not in DTYPES:
        weight = weight.float()
    outputs, inputs = weight.shape
    values = torch.empty(outputs, inputs, dtype=torch.int8)
    scales, sums = torch.empty(outputs), torch.empty(outputs, dtype=torch.int32)
    block = block_of(inputs)
    call = {
        "groups": 1,
        "steps": inputs // STEPS[8],
        "tiles": outputs,
        "base": 1,  # with one row per tile, values are stored in the order of the inputs
        "format": DTYPES.index(weight.dtype),
        # Weights and activations are both transformed, which multiplies results by `block`.
        "unit": _bits(1 / block),
        "source": weight.data_ptr(),
        "rows": values.data_ptr(),
        "row_scales": scales.data_ptr(),
        "sums": sums.data_ptr(),
    }
    run(f"quantise_8_{block}", call, outputs)
    return values, scales


def _bits(value: float) -> int:
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


def panels_linear(
    x: torch.Tensor,
    matrix: Int4Panels,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ matrix.T + bias`, [T, out], for x [T, in]."""
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    if more := matrix.scales.shape[1] * matrix.group - x.shape[1]:
        x = F.pad(x, (0, more))
    tables = {"scales": matrix.scales.data_ptr(), "zeros": matrix.zeros.data_ptr()}
    tables["unit"] = _bits(matrix.unit)
    return _linear(x, "quantise_4", 4, matrix.words, tables, matrix.group, matrix.outputs, bias)


def bytes_linear(
    x: torch.Tensor,
    matrix: Int8Panels,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `x @ matrix.T + bias`, [T, out], for x [T, in] and an 8-bit matrix. A row of x is
    quantized with a single scale.

    dtype: the dtype of the result. By default, it is the dtype of x.
    """
    words, scales = matrix.values, matrix.scales
    if more := 4 * words.shape[1] - x.shape[1]:
        x = F.pad(x, (0, more))
    tables = {"scales": scales.data_ptr(), "unit": ONE_BITS}
    quantise = f"quantise_8_{block_of(x.shape[1])}" if matrix.transformed else "quantise_8"
    return _linear(x, quantise, 8, words, tables, x.shape[1], len(scales), bias, dtype)


def _linear(
    x: torch.Tensor,
    quantise: str,
    bits: int,
    words: torch.Tensor,
    tables: dict[str, int],
    group: int,
    outputs: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `x @ matrix.T + bias`, for a batch that may be empty and any dtype.

    quantise: the name of the function that quantizes x.
    words: the matrix's packed weights.
    tables: the addresses of the matrix's scales and zero points, by name in `vnni_call.FIELDS`.
    """
    dtype = dtype or x.dtype
    output_dtype = dtype if dtype in DTYPES else torch.float32
    result = torch.empty(x.shape[0], outputs, dtype=output_dtype)
    if result.numel():
        _run(x.contiguous(), quantise, bits, words, tables, group, result, bias)
    return result.to(dtype)


def _run(
    x: torch.Tensor,
    quantise: str,
    bits: int,
    words: torch.Tensor,
    tables: dict[str, int],
    group: int,
    result: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    if x.dtype not in DTYPES:
        x = x.float()
    count, inputs = x.shape
    groups = inputs // group
    tiled = bits == 8 and takes_tiles(count, inputs)
    tiles = count if tiled else -(-count // ROWS)
    # AMX may read beyond the last row in its last block. The memory exists; its values are unused.
    most = -(-count // TILE_ROWS) * TILE_ROWS
    quantised = torch.empty(most * inputs + count * 8 * groups, dtype=torch.uint8)
    rows, scales = quantised.data_ptr(), quantised.data_ptr() + most * inputs
    added = padded_bias(bias, words.shape[0] * PANEL)
    call = {
        "outputs": result.shape[1],
        "groups": groups,
        "steps": group // STEPS[bits],
        "tiles": tiles,
        "base": count // tiles,
        "extra": count % tiles,
        "bias": added.data_ptr(),
        "format": DTYPES.index(x.dtype),
        "source": x.data_ptr(),
        "words": words.data_ptr(),
        "rows": rows,
        "row_scales": scales,
        "sums": scales + count * 4 * groups,
        "result": result.data_ptr(),
        **tables,
    }
    run(quantise, call, tiles)
    call["format"] = DTYPES.index(result.dtype)
    if tiled:
        blocks = {"tiles": most // TILE_ROWS, "base": count}
        setting = {"tile_setting": tile_setting().data_ptr()}
        run("product_8_tiled", call | blocks | setting, -(-words.shape[0] // TILE_PANELS))
    else:
        run(f"product_{bits}", call, words.shape[0])


def takes_tiles(rows: int, inputs: int) -> bool:
    """Return True if a matrix with this many inputs and a batch of this many rows is multiplied
    with AMX.
    """
    return rows >= MIN_TILED and inputs % TILE_INPUTS == 0 and has_amx("amx-int8")


def panels_reference(
    x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the same result as `panels_linear` for the packed `matrix`, in plain PyTorch.

    Tests use this function.
    """
    numbers, zeros = numbers_of(matrix), matrix.zeros
    groups = -(-matrix.inputs // matrix.group)
    unit = _unit(matrix.scales[:groups])
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    sums = torch.zeros(x.shape[0], numbers.shape[0], dtype=torch.float64)
    for group, scales in enumerate((matrix.scales[:groups].float() / unit).half().float()):
        some = slice(group * matrix.group, (group + 1) * matrix.group)
        rows = x[:, some].float()
        row_scales = rows.abs().amax(1, keepdim=True).div(LARGEST).clamp_min(MIN_SCALE)
        values = (rows / row_scales).round().long()
        zero = torch.tensor(float(ZERO_POINT)) if zeros is None else zeros[group].half().double()
        # An FMA rounds once. Double precision is exact here, and is then rounded to float32.
        whole = (values @ numbers[:, some].long().t()).float().double()
        whole -= values.sum(1, keepdim=True) * zero
        sums += (whole.float() * scales).double() * (row_scales * unit).double()
        sums = sums.float().double()
    result = sums.float()
    return (result if bias is None else result + bias).to(x.dtype)
