"""Products in 8 bits: what the reference says, and near what the matrix says; a row's bits are its
own.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Int8Matrix
from saccade.kernels.reference.hadamard import block_of, transform
from saccade.kernels.reference.int8 import (
    LARGEST,
    int8_linear_reference,
    quantise_matrix,
    quantise_rows,
    restore_matrix,
)
from saccade.kernels.reference.ops import Ops
from saccade.plugins.cpu import vnni_layout
from saccade.plugins.cpu.amx import has_amx
from tests.helpers.processor import FEW_BITS, needs_int8, needs_vnni
from tests.helpers.tensors import noise

pytestmark = needs_int8


def stored(weight: torch.Tensor) -> Int8Matrix:
    """A matrix as checkpoints have it in 8 bits."""
    scales = weight.abs().amax(1) / LARGEST
    return Int8Matrix((weight / scales.unsqueeze(1)).round().char(), scales)


def product(x: torch.Tensor, matrix: Int8Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matrix.ready(FEW_BITS).multiply(FEW_BITS, x, bias)


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("panels", [True, False], ids=["panels", "blocks"])
@pytest.mark.parametrize("made", [True, False], ids=["made", "stored"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 96),
        (3, 48, 80),
        (300, 37, 13),
        (0, 16, 8),
        (40, 4096, 24),
        (9, 768, 33),
        (2, 100, 7),
    ],
    ids=str,
)
def test_a_product_is_the_references_to_the_bit(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias: bool,
    made: bool,
    panels: bool,
) -> None:
    """In panels where the processor has the functions, and in oneDNN's blocks. A matrix that a
    checkpoint stores in 8 bits is not transformed.
    """
    ops = FEW_BITS if panels else Ops()
    rows, inputs, outputs = shape
    x = noise(rows, inputs, seed=1).to(dtype)
    matrix = ops.quantise_int8(noise(outputs, inputs, seed=2).to(dtype))
    if not made:
        matrix = stored(noise(outputs, inputs, seed=2))
    added = noise(outputs, seed=3).to(dtype) if bias else None
    result = matrix.ready(ops).multiply(ops, x, added)
    assert result.dtype == dtype and result.shape == (rows, outputs)
    assert torch.equal(result, int8_linear_reference(x, matrix, added))


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(40, 7000), (7, 64), (33, 4096), (5, 768), (1, 1)], ids=str)
def test_a_matrix_is_quantised_to_the_same_bits_by_pytorch(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = noise(*shape, seed=9).to(dtype)
    made, plain = FEW_BITS.quantise_int8(weight), quantise_matrix(weight)
    assert torch.equal(made.values, plain.values)
    assert torch.equal(made.scales, plain.scales)
    # A cut of a checkpoint's tensor skips what lies between its rows.
    inputs = shape[1] // 2
    cut = weight[:, inputs:]
    made, plain = FEW_BITS.quantise_int8(cut), quantise_matrix(cut)
    assert torch.equal(made.values, plain.values)
    assert torch.equal(made.scales, plain.scales)


def test_a_product_is_near_the_matrixs() -> None:
    x, weight = noise(50, 512, seed=1), noise(256, 512, seed=2) / 512**0.5
    error = product(x, FEW_BITS.quantise_int8(weight)) - F.linear(x, weight)
    assert error.pow(2).mean().sqrt() < 0.015


def test_one_large_input_spoils_no_other() -> None:
    """Without the transform, all others would be rounded in steps of the large one."""
    x, weight = noise(50, 512, seed=1), noise(256, 512, seed=2) / 512**0.5
    x[:, 3] *= 50
    expected = F.linear(x, weight)
    matrix = FEW_BITS.quantise_int8(weight)
    few, many = ((product(x, each) - expected).norm() for each in (matrix, stored(weight)))
    assert few < many / 2.5


def test_the_largest_values_of_either_sign_do_not_overflow() -> None:
    x = torch.ones(2, 4096)
    x[1] = -1
    weight = torch.ones(32, 4096)
    weight[::2] = -1
    y = product(x, FEW_BITS.quantise_int8(weight))
    torch.testing.assert_close(y, x @ weight.t())


@pytest.mark.parametrize("shape", [(2048, 512), (512, 1536), (96, 64)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    matrix = FEW_BITS.quantise_int8(noise(outputs, inputs, seed=4)).ready(FEW_BITS)
    x = noise(400, inputs, seed=5).bfloat16()
    alone = torch.cat([matrix.multiply(FEW_BITS, row) for row in x[:33].split(1)])
    for count in (2, 3, 8, 17, 33, 64, 400):
        assert torch.equal(matrix.multiply(FEW_BITS, x[:count])[:33], alone[:count]), count


def test_rows_and_outputs_of_zeros_stay_zero() -> None:
    x, weight = noise(3, 64, seed=6), noise(32, 64, seed=7)
    x[1], weight[5] = 0, 0
    y = product(x, FEW_BITS.quantise_int8(weight))
    assert y.isfinite().all() and not y[1].any() and not y[:, 5].any() and y[0, 0] != 0


def test_quantised_values_are_within_half_a_step() -> None:
    weight = noise(40, 7000, seed=8)
    matrix = FEW_BITS.quantise_int8(weight)
    whole = matrix.values * matrix.scales.unsqueeze(1)
    error = whole - transform(weight) / block_of(7040)
    assert (error.abs() <= 0.5001 * matrix.scales.unsqueeze(1)).all()
    near = restore_matrix(matrix, weight.shape[1]) - weight
    assert near.norm() < 0.01 * weight.norm()
    assert isinstance(matrix, Int8Matrix) and matrix.values.abs().amax() == 127
    values, scales = quantise_rows(weight, transformed=False)
    whole = (values.float() - 128) * scales
    assert ((whole - weight).abs() <= 0.5001 * scales).all()


@pytest.mark.skipif(not has_amx("amx-int8"), reason="no AMX")
@pytest.mark.parametrize("dtype", vnni_layout.DTYPES)
def test_many_rows_have_the_bits_of_few(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX multiplies many rows of one matrix, other instructions few: a prompt's row has the same
    bits in any chunk.
    """
    for rows, inputs, outputs in (
        (32, 64, 32),
        (33, 128, 90),
        (95, 1024, 33),
        (300, 448, 257),
        (64, 100, 40),
    ):
        x, bias = noise(rows, inputs, seed=1).to(dtype), noise(outputs, seed=2).to(dtype)
        x[1] = 0.0
        weight = noise(outputs, inputs, seed=3)
        matrix = vnni_layout.pack_int8(
            FEW_BITS.quantise_int8(weight) if outputs % 2 else stored(weight)
        )
        assert vnni_layout.takes_tiles(rows, 4 * matrix.values.shape[1])
        for added in (None, bias):
            many = matrix.multiply(FEW_BITS, x, added)
            with monkeypatch.context() as patched:
                patched.setattr(vnni_layout, "MIN_TILED", rows + 1)
                few = matrix.multiply(FEW_BITS, x, added)
            assert torch.equal(many, few)
            assert torch.equal(many[5:9], matrix.multiply(FEW_BITS, x[5:9], added))
