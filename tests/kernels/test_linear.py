"""Products and their activations against float64, with weights as the layers keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.processor import has_bf16
from saccade.kernels.reference import linear
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.ops import Ops
from saccade.plugins.cpu.amx import has_amx
from tests.helpers.processor import HAS_BACKEND, threads
from tests.helpers.tensors import noise

OPS = Ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "shape", [(1, 64, 96), (3, 48, 80), (200, 37, 13), (0, 16, 8), (2, 512, 400)], ids=str
)
def test_a_product_is_what_float64_says(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, activation: Activation
) -> None:
    rows, inputs, outputs = shape
    x, weight = (
        noise(rows, inputs, seed=1).to(dtype),
        (noise(outputs, inputs, seed=2) / inputs**0.5).to(dtype),
    )
    added = noise(outputs, seed=3).to(dtype) if bias else None
    wanted = EXACT[activation](
        F.linear(x.double(), weight.double(), None if added is None else added.double())
    )
    result = DenseMatrix(weight).ready(OPS).product(OPS, x, added, activation)
    assert result.dtype == dtype and result.shape == (rows, outputs)
    torch.testing.assert_close(
        result.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation_alone_takes_parts_of_a_larger_tensor(activation: Activation) -> None:
    gate = noise(5, 32, seed=4).chunk(2, dim=-1)[0]
    torch.testing.assert_close(
        activate(gate, activation).double(), EXACT[activation](gate.double()), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_may_be_a_slice_of_a_larger_one(dtype: torch.dtype) -> None:
    """As a rank of a tensor-parallel group cuts it."""
    whole = noise(24, 64, seed=5).to(dtype)
    x = noise(3, 32, seed=6).to(dtype)
    wanted = x.double() @ whole[:, 16:48].double().t()
    torch.testing.assert_close(
        DenseMatrix(whole[:, 16:48]).ready(OPS).multiply(OPS, x).double(),
        wanted,
        atol=0.0,
        rtol=TOLERANCE[dtype] * 4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_at_every_call(dtype: torch.dtype) -> None:
    x, matrix = noise(33, 64, seed=7).to(dtype), DenseMatrix(noise(96, 64, seed=8).to(dtype))
    ready = matrix.ready(OPS)
    first, second = (ready.product(OPS, x, None, "gelu") for _ in range(2))
    assert torch.equal(first, second)


class MatmulLog(TorchDispatchMode):
    """Records the dtype and the number of weight values of each matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append((args[-1].dtype, args[-1].numel()))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_processor_without_16_bit_products_multiplies_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool
) -> None:
    monkeypatch.setattr(linear, "has_instructions", lambda _: False)
    inputs, outputs = 1000, 1111
    weight = (noise(outputs, inputs, seed=2) / inputs**0.5).to(dtype)
    added = noise(outputs, seed=3).to(dtype) if bias else None
    matrix = DenseMatrix(weight).ready(OPS)
    for shape in ((linear.MIN_WIDENED_ROWS,), (2, 3, 7)):
        x = noise(*shape, inputs, seed=1).to(dtype)
        with MatmulLog() as log:
            result = matrix.multiply(OPS, x, added)
        assert {each for each, _ in log.seen} == {torch.float32}
        assert max(values for _, values in log.seen) <= linear.WIDENED_VALUES
        assert sum(values for _, values in log.seen) == weight.numel()
        wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), wanted, atol=1e-5, rtol=torch.finfo(dtype).eps)
    with MatmulLog() as log:
        matrix.multiply(OPS, x.flatten(0, 2)[: linear.MIN_WIDENED_ROWS - 1], added)
    assert {each for each, _ in log.seen} == {dtype}


COUNTS = (2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 100, 513, 700)
"""Of rows: within a tile and a block, whole blocks and not, and in several pieces."""


@pytest.fixture(params=["tiles", "vectors"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    if not has_bf16() or not HAS_BACKEND:
        pytest.skip("PyTorch multiplies bfloat16 here")
    from saccade.plugins.cpu import dense
    from saccade.plugins.cpu.ops import X86Ops

    if request.param == "vectors":
        monkeypatch.setattr(dense, "has_amx", lambda _: False)
    elif not has_amx("amx-bf16"):
        pytest.skip("no AMX")
    return X86Ops()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 32), (37, 13), (588, 200), (1040, 96), (3072, 80), (4304, 64)]
)
def test_a_row_has_its_bits_in_any_company(ops: Ops, inputs: int, outputs: int, bias: bool) -> None:
    """oneDNN chooses the order of its sums by the counts of rows and threads."""
    weight = (noise(outputs, inputs, seed=2) / inputs**0.5).bfloat16()
    matrix = DenseMatrix(weight).ready(ops)
    added = noise(outputs, seed=3).bfloat16() if bias else None
    x = noise(max(COUNTS), inputs, seed=1).bfloat16()
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    rows = torch.cat([matrix.multiply(ops, row[None], added) for row in x])
    torch.testing.assert_close(rows.double(), wanted, atol=1e-2, rtol=1e-2)
    less = -rows[0]  # what is left shows bits that rounding would hide
    alone = torch.cat([matrix.multiply(ops, row[None], less) for row in x])
    for each, found, other in ((1, rows, added), (3, alone, less)):
        with threads(each):
            for count in COUNTS:
                assert torch.equal(matrix.multiply(ops, x[-count:], other), found[-count:]), count


def test_a_matrix_in_panels_can_be_read_back(ops: Ops) -> None:
    weight = noise(45, 70).bfloat16()
    matrix = DenseMatrix(weight).ready(ops)
    assert not isinstance(matrix, DenseMatrix) and torch.equal(matrix.dense(), weight)


def test_rows_of_any_shape_are_multiplied(ops: Ops) -> None:
    matrix = DenseMatrix(noise(40, 64, seed=2).bfloat16()).ready(ops)
    x = noise(6, 64).bfloat16()
    flat = matrix.multiply(ops, x)
    assert torch.equal(matrix.multiply(ops, x.view(2, 3, 64)), flat.view(2, 3, 40))
    assert torch.equal(matrix.multiply(ops, x.t().contiguous().t()), flat)
    assert matrix.multiply(ops, x[:0]).shape == (0, 40)


@pytest.mark.parametrize("shape", [(4, 32), (2, 128)], ids=str)
def test_rows_of_another_width_are_refused(ops: Ops, shape: tuple[int, int]) -> None:
    matrix = DenseMatrix(noise(40, 64).bfloat16()).ready(ops)
    with pytest.raises(AssertionError):
        matrix.multiply(ops, noise(*shape).bfloat16())


def test_a_bias_may_lie_in_any_way(ops: Ops) -> None:
    matrix, x = DenseMatrix(noise(40, 64).bfloat16()).ready(ops), noise(3, 64).bfloat16()
    bias = noise(40, 2, seed=1)[:, 0]
    assert torch.equal(matrix.multiply(ops, x, bias), matrix.multiply(ops, x, bias.clone()))
    with pytest.raises(AssertionError):
        matrix.multiply(ops, x, bias[:39])


def test_float32_is_pytorchs(ops: Ops) -> None:
    assert isinstance(DenseMatrix(noise(512, 512)).ready(ops), DenseMatrix)


def test_on_a_gpu_bias_and_gelu_are_applied_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are in tests/gpu/test_kernels.py: on a CPU, PyTorch's operation is the exact GELU."""
    pytest.importorskip("triton")
    from saccade.plugins.gpu.triton.ops import TritonOps

    class Dispatched(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += [op.name()] * (not op.is_view)
            return op(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.is_meta))
    x, weight, bias = (torch.empty(*shape, device="meta") for shape in ((5, 64), (96, 64), (96,)))
    with Dispatched() as dispatched:
        result = TritonOps().dense_linear(x, weight, bias, "gelu_tanh")
        assert result.shape == (5, 96)
        assert dispatched.names == ["aten::_addmm_activation"]
        TritonOps().dense_linear(x, weight, bias, "gelu")
    assert dispatched.names == ["aten::_addmm_activation", "aten::addmm", "aten::gelu"]
