"""Rows in 8 bits beside what PyTorch makes of them, without a GPU in Triton's interpreter; and
products of such rows with matrices in 8 bits, which PyTorch has on CPUs too where scales are of
whole rows.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from saccade.kernels import device as placement
from saccade.kernels.matrix import FP8, MAX_UNQUANTIZED_ROWS, Fp8Matrix, Fp8Rows, Rows
from saccade.kernels.reference import fp8
from saccade.kernels.reference.fp8 import (
    BLOCK,
    LARGEST,
    block_scales,
    dense,
    prepare,
    quantise_rows,
    to_fp8,
)
from saccade.kernels.reference.ops import Ops
from tests.quantising import SCALES_BY_ROWS

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.scaled import (
    launch_add_norm_scaled,
    launch_quantise,
    launch_silu_gate_scaled,
)
from tests.helpers.tensors import noise
from tests.kernels.conftest import HAS_GPU, broad

DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.half)
PLAIN = Ops()
SIZES = [(96, 96), (2560, 128), (256, 256), (3420, 3420), (384, 128)]
"""Values of a row, and those that share a scale."""
FEW = [(SIZES[0], DTYPES[0]), (SIZES[2], DTYPES[1]), (SIZES[4], DTYPES[0])]
"""One group, one that is the row, several."""
STEP = 1 / 8
"""Between neighbours of the format, of the smaller one's value."""


def check_alike(found: Fp8Rows, wanted: Rows) -> None:
    """The same but for the last bits of what was quantised: a few values then round the other
    way.
    """
    assert isinstance(wanted, Fp8Rows)
    assert found[2:] == wanted[2:] and found.values.dtype == FP8
    assert found.values.shape == wanted.values.shape
    assert found.scales.stride(0) == 1 and found.scales.shape == wanted.scales.shape
    scales, its_scales = (each.scales.cpu()[: found.rows] for each in (found, wanted))
    rounding = torch.finfo(wanted.dtype).eps  # the largest value, which a scale follows, may round
    torch.testing.assert_close(scales, its_scales, rtol=max(2e-3, rounding), atol=0.0)
    mine, its = (
        found._replace(values=found.values.cpu(), scales=found.scales.cpu()).dense(),
        (wanted.dense()),
    )
    off = (mine - its).abs()
    same = ((scales - its_scales).abs() <= 2e-3 * its_scales).repeat_interleave(found.group, 1)
    assert same.float().mean() > 0.5
    assert (off > 5e-3 * its.abs() + 1e-6)[same[:, : off.shape[1]]].float().mean() < 0.02
    assert (off <= 1.1 * STEP * its.abs() + 2 * wanted.scales.max() * 2**-9).all()


@pytest.mark.parametrize(("shape", "dtype"), broad(product(SIZES, DTYPES), FEW))
def test_rows_become_eight_bits(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    size, group = shape
    x = noise(5, 2 * size).to(dtype)[:, :size]
    x[1] = 0.0
    x[2] *= 1e-4
    found, wanted = launch_quantise(x.to(device), group), quantise_rows(x, group)
    check_alike(found, wanted)
    assert found.rows == 5 and len(found.values) == 8, "padded to whole fours"
    assert wanted.values.float().abs().amax() == LARGEST
    torch.testing.assert_close(wanted.dense(), x.float(), rtol=1 / 16, atol=2e-5)
    assert not found.dense()[1].any()


@pytest.mark.parametrize(("shape", "dtype"), broad(product(SIZES, DTYPES), FEW))
def test_a_normalised_stream_leaves_in_eight_bits(
    device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    size, group = shape
    rows = MAX_UNQUANTIZED_ROWS + 1
    x, delta = noise(rows, size).to(dtype), noise(rows, size, seed=1).to(dtype)
    weight = 1 + noise(size, seed=2).to(dtype)
    total, wanted = PLAIN.add_rms_norm_rows(x, delta, weight, 1e-6, group)
    there = [each.to(device) for each in (x, delta, weight)]
    ours, found = launch_add_norm_scaled(there[0], there[1], there[2], 1e-6, group)
    assert torch.equal(ours.cpu(), total)
    check_alike(found, wanted)
    plain = PLAIN.add_rms_norm(x, delta, weight, 1e-6)[1]
    assert isinstance(wanted, Fp8Rows)
    torch.testing.assert_close(wanted.dense(), plain.float(), rtol=1 / 15, atol=1e-2)


@pytest.mark.parametrize(("shape", "dtype"), broad(product(SIZES, DTYPES), FEW))
def test_a_gated_row_leaves_in_eight_bits(
    device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    size, group = shape
    both = noise(MAX_UNQUANTIZED_ROWS + 2, 2 * size).to(dtype)
    wanted = PLAIN.gate_rows(both, "silu", group)
    check_alike(launch_silu_gate_scaled(both.to(device), group), wanted)
    assert isinstance(PLAIN.gate_rows(both, "gelu", group), Fp8Rows)


def test_few_rows_and_those_of_other_products_stay_as_they_are() -> None:
    x = noise(MAX_UNQUANTIZED_ROWS, 32)
    for rows, group in ((x, 32), (noise(MAX_UNQUANTIZED_ROWS + 1, 32), 0)):
        normed = PLAIN.add_rms_norm_rows(rows, rows, torch.ones(32), 1e-6, group)[1]
        assert isinstance(normed, torch.Tensor)
        assert isinstance(PLAIN.gate_rows(rows, "silu", group and 16), torch.Tensor)


@pytest.mark.parametrize("group", [128, 256])
def test_a_row_is_the_same_whatever_the_others_are(device: str, group: int) -> None:
    x = noise(6, 256).to(device)
    other = 100 * x
    other[3] = x[3]
    for left, right in zip(launch_quantise(x, group)[:2], launch_quantise(other, group)[:2]):
        assert torch.equal(left[3].float(), right[3].float())


def matrix(outputs: int, inputs: int, group: int, seed: int = 2) -> Fp8Matrix:
    """In blocks of outputs too, where it is in groups of 128."""
    high = BLOCK if group == BLOCK != inputs else 1
    scales = noise(outputs // high, inputs // group, seed=seed).exp().repeat_interleave(high, 0)
    return Fp8Matrix(to_fp8(noise(outputs, inputs, seed=seed)), scales.contiguous(), group)


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does."""
    monkeypatch.setattr(placement, "multiplies_fp8", lambda *_: True)
    monkeypatch.setattr(placement, "multiplies_blocks", lambda _: True)


@pytest.mark.parametrize("group", [256, 128])
def test_a_device_that_refuses_the_product_has_rows_as_they_are(
    multiplies: None, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """As cuBLAS refuses scales by rows on sm_120. A device without memory is no such device."""
    raised: Exception = RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def refuse(*_: object) -> torch.Tensor:
        raise raised

    monkeypatch.setattr(fp8, "scaled_linear", refuse)
    plain = matrix(256, 256, group)
    ready = prepare(plain, torch.bfloat16)
    assert not ready.scaled and not ready.rows_group()
    x = noise(MAX_UNQUANTIZED_ROWS + 3, 256)
    assert torch.equal(PLAIN.fp8_linear(x, ready), PLAIN.fp8_linear(x, plain))
    raised = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        prepare(plain, torch.bfloat16)


@SCALES_BY_ROWS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(48, 96, 96), (256, 384, 128)])
def test_many_rows_are_multiplied_in_eight_bits(
    multiplies: None, outputs: int, inputs: int, group: int, biased: bool
) -> None:
    ready = prepare(matrix(outputs, inputs, group), torch.float32)
    assert ready.rows_group() == group and (ready.blocks is not None) == (group == BLOCK)
    x = noise(MAX_UNQUANTIZED_ROWS + 3, inputs) / inputs**0.5
    bias = noise(outputs, seed=4) if biased else None
    found = PLAIN.fp8_linear(x, ready, bias)
    eight = quantise_rows(x, group)
    torch.testing.assert_close(
        found, F.linear(eight.dense(), dense(ready), bias), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(PLAIN.fp8_linear(eight, ready, bias), found)
    exact = F.linear(x, dense(ready), bias)
    off = (found - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.04, "three bits of mantissa"
    few = PLAIN.fp8_linear(x[:MAX_UNQUANTIZED_ROWS], ready, bias)
    torch.testing.assert_close(few, exact[:MAX_UNQUANTIZED_ROWS], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(multiplies: None, device: str, bad: float) -> None:
    ready = prepare(matrix(32, 64, 64), torch.float32)
    x = noise(MAX_UNQUANTIZED_ROWS + 1, 64)
    x[3, 5] = bad
    found = PLAIN.fp8_linear(x, ready)
    assert not found[3].isfinite().any() and found[4:].isfinite().all()
    assert launch_quantise(x.to(device), 64).dense()[3].isnan().any()


def test_scales_of_blocks_lie_as_products_read_them() -> None:
    scales = noise(2, 5).repeat_interleave(BLOCK, 0)
    blocks = block_scales(scales)
    assert blocks is not None and blocks.shape == (8, 2) and blocks.stride() == (1, 8)
    assert torch.equal(blocks[:5], scales[::BLOCK].t()) and not blocks[5:].any()
    scales[BLOCK + 1, 2] += 1.0
    assert block_scales(scales) is None, "a cut, or parts, that begin within a block"
    assert block_scales(scales[:-1]) is None


def test_other_matrices_are_read_as_before(multiplies: None) -> None:
    mixed = matrix(256, 384, 128)
    mixed.scales[3] += 1.0
    for each in (mixed, matrix(256, 384, 32), matrix(40, 96, 96), matrix(48, 72, 72)):
        ready = prepare(each, torch.float32)
        assert ready.rows_group() == 0
        x = noise(MAX_UNQUANTIZED_ROWS + 1, each.values.shape[1])
        assert torch.equal(PLAIN.fp8_linear(x, ready), F.linear(x, dense(each)))


def test_a_cpu_multiplies_no_eight_bits() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert not prepare(matrix(48, 96, 96), dtype).scaled
    assert not placement.multiplies_fp8(torch.device("cpu"), torch.bfloat16)
    assert matrix(48, 96, 96).rows_group() == 0
