"""Products and their activations against float64, with weights as the layers keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from saccade.kernels.processor import has_bf16
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.ops import Ops
from saccade.kernels.x86.amx import has_amx
from saccade.kernels.x86.dense_call import MOST_ROWS
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
    result = OPS.dense_linear(x, OPS.pack(weight), added, activation)
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
        OPS.dense_linear(x, OPS.pack(whole[:, 16:48])).double(),
        wanted,
        atol=0.0,
        rtol=TOLERANCE[dtype] * 4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_at_every_call(dtype: torch.dtype) -> None:
    x, weight = noise(33, 64, seed=7).to(dtype), OPS.pack(noise(96, 64, seed=8).to(dtype))
    first, second = (OPS.dense_linear(x, weight, None, "gelu") for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif(not has_bf16(), reason="the processor multiplies no bfloat16")
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 192), (576, 1536), (1024, 3072), (1536, 576), (3072, 1024)]
)
def test_a_row_alone_has_the_bits_that_it_has_in_a_prompt(inputs: int, outputs: int) -> None:
    """oneDNN adds up a lone row of some shapes in an order of its own."""
    pytest.importorskip("numba")
    from saccade.kernels.x86.ops import X86Ops

    ops = X86Ops()
    packed = ops.pack((noise(outputs, inputs, seed=2) / inputs**0.5).bfloat16())
    x = noise(MOST_ROWS + 1, inputs, seed=1).bfloat16()
    # Less the sums, what is left shows bits that rounding would hide.
    less = -ops.dense_linear(x[:2], packed)[0]
    together = ops.dense_linear(x, packed, less)
    alone = torch.cat([ops.dense_linear(row[None], packed, less) for row in x])
    assert torch.equal(alone, together)


@pytest.mark.skipif(not has_amx("amx-bf16"), reason="no AMX")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (160, 256), (512, 1056)])
def test_a_row_of_few_has_the_bits_that_it_has_alone(
    inputs: int, outputs: int, bias: bool, threads: int
) -> None:
    from saccade.kernels.x86.dense import multiplies
    from saccade.kernels.x86.ops import X86Ops

    ops, weight = X86Ops(), (noise(outputs, inputs, seed=2) / inputs**0.5).bfloat16()
    packed = ops.pack(weight)
    added = noise(outputs, seed=3).bfloat16() if bias else None
    x = noise(MOST_ROWS, inputs, seed=1).bfloat16()
    if not multiplies(x, packed):
        pytest.skip("oneDNN packs matrices in another way here")
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([ops.dense_linear(row[None], packed, added) for row in x])
        torch.testing.assert_close(alone.double(), wanted, atol=1e-2, rtol=1e-2)
        for rows in range(2, MOST_ROWS + 1):
            assert torch.equal(ops.dense_linear(x[-rows:], packed, added), alone[-rows:])
    finally:
        torch.set_num_threads(before)
    assert not multiplies(noise(MOST_ROWS + 1, inputs).bfloat16(), packed)


@pytest.mark.skipif(not has_amx("amx-bf16"), reason="no AMX")
def test_matrices_whose_memory_is_not_known_are_onednns() -> None:
    from saccade.kernels.x86.dense import multiplies
    from saccade.kernels.x86.onednn_blocks import pack_and_look, panel_width

    assert panel_width(96, 4096) == 0, "none was packed"
    for outputs, inputs in ((80, 64), (64, 40)):  # no whole panels; no whole tiles
        packed = pack_and_look(noise(outputs, inputs).bfloat16())
        assert not multiplies(noise(2, inputs).bfloat16(), packed)
    assert not multiplies(noise(2, 512), pack_and_look(noise(512, 512))), "float32 is oneDNN's"
