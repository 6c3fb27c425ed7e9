"""Matrices of 4 bits: their layout, and products with them beside the same product written out,
without a GPU in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Int4Matrix
from saccade.kernels.reference.int4 import dense, int4_linear, numbers_of, pack_int4

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.int4 import launch_int4
from tests.helpers.tensors import noise
from tests.kernels.conftest import bounds

TOLERANCE = bounds(2e-5, 2e-2)


def matrix_of(
    outputs: int, inputs: int, group: int, zeros: bool, ordered: bool = True, device: str = "cpu"
) -> tuple[Int4Matrix, torch.Tensor]:
    """A matrix of random numbers, and what it means, written out one by one."""
    source = torch.Generator().manual_seed(outputs * inputs + group)
    numbers = torch.randint(16, (outputs, inputs), generator=source, dtype=torch.uint8)
    groups = -(-inputs // group)
    scales = noise(outputs, groups, seed=1).exp().half()
    points = torch.randint(17, (outputs, groups), generator=source, dtype=torch.uint8)
    order = None if ordered else torch.randperm(inputs, generator=source)
    meant = torch.zeros(outputs, inputs)
    for at in range(inputs):
        zero = points[:, at // group].float() if zeros else 8.0
        column = (numbers[:, at].float() - zero) * scales[:, at // group].float()
        meant[:, at if order is None else order[at]] = column
    matrix = pack_int4(
        numbers.to(device),
        scales.to(device),
        points.to(device) if zeros else None,
        group,
        None if order is None else order.to(device),
    )
    assert numbers_of(matrix).cpu().equal(numbers)
    return matrix, meant


SHAPES = [(70, 96, 96), (64, 128, 32), (33, 256, 128), (16, 200, 64), (130, 160, 160)]


@pytest.mark.sparse
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_layout_means_its_numbers(
    outputs: int, inputs: int, group: int, zeros: bool, ordered: bool
) -> None:
    matrix, meant = matrix_of(outputs, inputs, group, zeros, ordered)
    assert dense(matrix).equal(meant)
    assert matrix.words.nbytes == outputs * -(-inputs // 128) * 64
    x = noise(3, inputs)
    torch.testing.assert_close(int4_linear(x, matrix), x @ meant.t())


def test_a_word_holds_neighbours_sixteen_bits_apart() -> None:
    numbers = torch.zeros(1, 256, dtype=torch.uint8)
    for column, number in ((128, 1), (129, 2), (160, 3), (161, 4), (130, 5), (225, 7)):
        numbers[0, column] = number
    words = pack_int4(numbers, torch.ones(1, 2), None, 128).words[0].tolist()
    assert words[:16] == [0] * 16
    assert words[16:18] == [1 | 2 << 16 | 3 << 4 | 4 << 20 | 7 << 28, 5]


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "zeros", "ordered"),
    [
        (1, 70, 96, 96, False, True),
        (5, 64, 256, 32, True, True),
        (3, 33, 640, 128, True, False),
        (40, 130, 320, 64, False, True),
        (17, 16, 200, 200, True, False),
        (129, 64, 192, 96, True, True),
        (70, 140, 256, 128, False, False),
    ],
)
def test_a_product_is_that_of_the_dense_matrix(
    device: str,
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    zeros: bool,
    ordered: bool,
    dtype: torch.dtype,
) -> None:
    matrix, meant = matrix_of(outputs, inputs, group, zeros, ordered)
    x = noise(rows, 2 * inputs).to(dtype)[:, :inputs] / (8 * inputs**0.5)
    bias = noise(outputs, seed=3).to(dtype) if rows % 2 else None
    wanted = x.double() @ meant.double().t() + (0.0 if bias is None else bias.double())
    there, _ = matrix_of(outputs, inputs, group, zeros, ordered, device)
    ours = launch_int4(x.to(device), there, None if bias is None else bias.to(device))
    for found in (ours.cpu(), int4_linear(x, matrix, bias)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=2e-3)


@pytest.mark.parametrize(("inputs", "group", "more"), [(96, 96, 64), (200, 64, 56), (128, 32, 64)])
def test_what_pads_adds_nothing(inputs: int, group: int, more: int) -> None:
    matrix, meant = matrix_of(10, inputs, group, zeros=True, ordered=False)
    wide = dense(matrix.pad_outputs([4, 6], 3))
    assert wide.equal(torch.cat([F.pad(part, (0, 0, 0, 3)) for part in meant.split([4, 6])]))
    long = matrix.pad_inputs(more)
    assert dense(long)[:, :inputs].equal(meant) and dense(long).isfinite().all()
    assert dense(long).shape[1] == long.inputs == inputs + more


def test_no_rows_are_no_trouble(device: str) -> None:
    matrix, _ = matrix_of(8, 128, 128, zeros=False)
    assert int4_linear(torch.zeros(0, 128), matrix).shape == (0, 8)
    there, _ = matrix_of(8, 128, 128, zeros=False, device=device)
    assert launch_int4(torch.zeros(0, 128, device=device), there, None).shape == (0, 8)
