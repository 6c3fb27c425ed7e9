"""Products with matrices in FP8 beside the same product written out, without a GPU in Triton's
interpreter; how values become FP8.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from saccade.kernels.matrix import FP8, Fp8Matrix
from saccade.kernels.reference.fp8 import dense, to_fp8
from saccade.kernels.reference.layer import put_rows
from saccade.kernels.reference.ops import Ops

pytest.importorskip("triton")
import triton
import triton.language as tl

from saccade.plugins.gpu.triton import fp8 as fp8_gpu
from saccade.plugins.gpu.triton import tiling
from saccade.plugins.gpu.triton.fp8 import as_rows, launch_fp8
from tests.helpers.tensors import noise
from tests.kernels.conftest import bounds


@triton.jit
def _convert(weights, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, as_rows(tl.load(weights + at), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_weight_of_eight_bits_is_converted_exactly(device: str, dtype: torch.dtype) -> None:
    """Also by way of float32. The interpreter does not know which bits are no number."""
    weights = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    out = torch.empty(256, dtype=dtype, device=device)
    _convert[(1,)](weights, out, 256)
    numbers = ~weights.float().isnan()
    assert torch.equal(out.float()[numbers], weights.float()[numbers])


TOLERANCE = bounds(2e-5, 2e-2)


@pytest.mark.sparse
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(1, 70, 96, 96), (5, 64, 100, 16), (3, 33, 256, 128), (40, 130, 160, 96), (129, 64, 64, 32)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_dense_matrix(
    device: str, rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, biased: bool
) -> None:
    scales = noise(outputs, -(-inputs // group), seed=1).exp()
    matrix = Fp8Matrix(to_fp8(noise(outputs, inputs, seed=2)), scales, group)
    x = noise(rows, 2 * inputs).to(dtype)[:, :inputs] / inputs**0.5
    bias = noise(outputs, seed=3).to(dtype) if biased else None
    wanted = x.double() @ dense(matrix).double().t()
    wanted += 0.0 if bias is None else bias.double()
    there = Fp8Matrix(matrix.values.to(device), scales.to(device), group)
    ours = launch_fp8(x.to(device), there, None if bias is None else bias.to(device))
    for found in (ours.cpu(), Ops().fp8_linear(x, matrix, bias)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=2e-3)


@pytest.mark.sparse
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group", [32, 128, 200])
@pytest.mark.parametrize("programs", [3, 5, 120])
def test_a_product_of_few_rows_is_the_same_however_it_is_cut(
    device: str, programs: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of no whole number of parts; outputs of no whole number of tiles."""
    monkeypatch.setattr(tiling, "PROGRAMS", programs)
    rows, outputs, inputs = 3, 130, 200
    scales = noise(outputs, -(-inputs // group), seed=1).exp()
    matrix = Fp8Matrix(to_fp8(noise(outputs, inputs, seed=2)), scales, group)
    x, bias = noise(rows, inputs).to(dtype) / inputs**0.5, noise(outputs, seed=3).to(dtype)
    wanted = x.double() @ dense(matrix).double().t() + bias.double()
    there = Fp8Matrix(matrix.values.to(device), scales.to(device), group)
    ours = launch_fp8(x.to(device), there, bias.to(device)).cpu()
    torch.testing.assert_close(ours.double(), wanted, atol=TOLERANCE[dtype], rtol=2e-3)


@pytest.mark.parametrize("outputs", [2560, 4096, 6144, 19_456])
def test_few_rows_fill_a_device(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-VL-4B's and 8B's matrices."""
    grids: list[tuple[int, int]] = []

    class Grid:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("_few", "_product"):
        monkeypatch.setattr(fp8_gpu, name, Grid())
    matrix = Fp8Matrix(torch.empty(outputs, 256, dtype=FP8), torch.empty(outputs, 2), 128)
    for rows in (1, 16):
        launch_fp8(torch.empty(rows, 256), matrix, None)
    assert min(across * down for across, down in grids) >= 120


def test_no_rows_are_no_trouble(device: str) -> None:
    matrix = Fp8Matrix(torch.zeros(8, 16, dtype=FP8), torch.ones(8, 1), 16)
    assert Ops().fp8_linear(torch.zeros(0, 16), matrix).shape == (0, 8)
    there = Fp8Matrix(matrix.values.to(device), matrix.scales.to(device), 16)
    assert launch_fp8(torch.zeros(0, 16, device=device), there, None).shape == (0, 8)


def test_what_is_too_large_becomes_the_largest() -> None:
    values = torch.tensor([1e9, -1e9, 449.0, 1.97, torch.nan])
    assert to_fp8(values).float().tolist()[:4] == [448.0, -448.0, 448.0, 2.0]
    assert to_fp8(values).float()[4].isnan()
    kept = torch.zeros(3, 1, dtype=FP8)
    put_rows(kept, torch.tensor([2, 0]), torch.tensor([[3.0], [500.0]]), 2.0)
    assert kept.flatten().float().tolist() == [256.0, 0.0, 1.5]
