"""Rows and their experts beside the same written out, without a GPU in Triton's interpreter; that
the order of pairs is a sort, and that nothing is read of experts without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.kernels.matrix import Fp8Experts, Stack
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.experts import expert, stacked_mlp
from saccade.kernels.reference.fp8 import to_fp8
from saccade.kernels.reference.moe import route
from saccade.kernels.reference.ops import Ops

pytest.importorskip("triton")
from saccade.plugins.gpu.triton import experts as experts_gpu
from saccade.plugins.gpu.triton.experts import by_expert, launch_experts, launch_route
from tests.families.forwarding import Session, load
from tests.helpers.tensors import noise
from tests.kernels.conftest import HAS_GPU, bounds, broad

TOLERANCE = bounds(2e-5, 4e-3)
HIDDEN, WIDTH, EXPERTS = 96, 48, 6


def routed(rows: int, top: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts, none twice in a row; and shares."""
    chosen = noise(rows, experts, seed=9).argsort(1)[:, :top]
    return chosen, noise(rows, top, seed=8).softmax(1)


def stacked(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> Stack:
    """group 0: not in 8 bits."""
    values = noise(EXPERTS, outputs, inputs, seed=outputs) / inputs**0.5
    if not group:
        return values.to(dtype)
    scales = noise(EXPERTS, outputs, -(-inputs // group), seed=7).exp() / inputs**0.5
    return Fp8Experts(to_fp8(values), scales, group)


def on(device: str, experts: Stack) -> Stack:
    if isinstance(experts, torch.Tensor):
        return experts.to(device)
    return experts._replace(values=experts.values.to(device), scales=experts.scales.to(device))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "count", "top"), [(1, 6, 1), (9, 6, 6), (17, 128, 8), (0, 6, 2)])
def test_rows_go_where_they_would_and_shares_are_theirs(
    device: str, rows: int, count: int, top: int, dtype: torch.dtype
) -> None:
    """Also of a view of wider rows. Logits differ by as much as their format tells apart."""
    apart = noise(rows, count + 3, seed=5).argsort(1) / 16
    logits = apart.to(dtype)[:, :count]
    wanted, found = route(logits, top), launch_route(logits.to(device), top)
    assert found.experts.tolist() == wanted.experts.tolist()
    assert found.experts.dtype == torch.int64 and found.shares.dtype == dtype
    torch.testing.assert_close(found.shares.cpu(), wanted.shares, atol=1e-6, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_of_equal_experts_the_first_are_taken_and_rows_of_no_numbers_stay_that(device: str) -> None:
    """So that no address is made of what is no number, and what is wrong is seen at the end."""
    logits = torch.zeros(4, 12)
    logits[1] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, :11] = float("-inf")
    found = launch_route(logits.to(device), 3)
    assert found.experts[0].tolist() == [0, 1, 2] and found.experts[3, 0] == 11
    assert (found.experts >= 0).all() and (found.experts < 12).all()
    assert found.shares.isfinite().all(1).tolist() == [True, False, False, True]
    assert found.shares[3].tolist() == [1, 0, 0]


CASES = [
    *((1, 2, (0, 0)), (7, 3, (32, 16)), (40, 3, (HIDDEN, WIDTH))),
    *((80, 2, (32, 16)), (200, 2, (0, 0))),
]
"""Rows, experts of each, and how many of a matrix's values share a scale."""


@pytest.mark.first
@pytest.mark.parametrize("act", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    ("case", "dtype"),
    broad(
        product(CASES, TOLERANCE),
        keep=[
            *((CASES[0], torch.float32), (CASES[1], torch.float16), (CASES[2], torch.float32)),
            *((CASES[4], torch.float16),),
        ],
    ),
)
def test_rows_get_what_their_experts_make(
    device: str, case: tuple[int, int, tuple[int, int]], dtype: torch.dtype, act: Activation
) -> None:
    rows, top, groups = case
    up = stacked(2 * WIDTH, HIDDEN, groups[0], dtype)
    down = stacked(HIDDEN, WIDTH, groups[1], dtype)
    chosen, shares = routed(rows, top)
    x = noise(rows, 2 * HIDDEN).to(dtype)[:, :HIDDEN]
    wanted = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row in range(rows):
        for number, share in zip(chosen[row].tolist(), shares[row].tolist()):
            inner = expert(up, number).double() @ x[row].double()
            gated = activate(inner[:WIDTH], act) * inner[WIDTH:]
            wanted[row] += share * (expert(down, number).double() @ gated)
    asked = (x.to(device), chosen.to(device), shares.to(device, dtype))
    ours = launch_experts(*asked, on(device, up), on(device, down), 0, act)
    for found in (ours.cpu(), stacked_mlp(x, chosen, shares.to(dtype), up, down, 0, act)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=4e-3)


@pytest.mark.parametrize(
    ("rows", "top", "count"), [(1, 1, 1), (5, 2, 3), (90, 8, 130), (33, 4, 64)]
)
@pytest.mark.parametrize("most", [0, experts_gpu.COMPARED], ids=["sorted", "compared"])
def test_pairs_are_put_in_the_order_of_their_experts(
    device: str, rows: int, top: int, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_gpu, "COMPARED", most)
    chosen, _ = routed(rows, top, count)
    order, starts = (each.cpu() for each in by_expert(chosen.to(device), 0, count))
    flat = chosen.flatten()
    assert order.long().equal(flat.argsort(stable=True))
    assert starts.tolist() == [int((flat < number).sum()) for number in range(count + 1)]


def test_experts_without_rows_are_not_read(device: str) -> None:
    up = stacked(2 * WIDTH, HIDDEN, 0, torch.float32)
    down = stacked(HIDDEN, WIDTH, 0, torch.float32)
    chosen, shares = routed(1, 2)
    others = [number for number in range(EXPERTS) if number not in chosen[0].tolist()]
    x = noise(1, HIDDEN)
    wanted = stacked_mlp(x, chosen, shares, up, down)
    for stack in (up, down):
        assert isinstance(stack, torch.Tensor)
        stack[others] = torch.nan
    asked = (x.to(device), chosen.to(device), shares.to(device))
    found = launch_experts(*asked, on(device, up), on(device, down), 0).cpu()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_experts_of_other_ranks_add_nothing(device: str) -> None:
    up = stacked(2 * WIDTH, HIDDEN, 0, torch.float32)
    down = stacked(HIDDEN, WIDTH, 0, torch.float32)
    assert isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)
    chosen, shares = routed(20, 3)
    x = noise(20, HIDDEN)
    whole = stacked_mlp(x, chosen, shares, up, down)
    asked = (x.to(device), chosen.to(device), shares.to(device))
    total, referred = torch.zeros(20, HIDDEN), torch.zeros(20, HIDDEN)
    for first in (0, 2, 4):
        some = slice(first, first + 2)
        mine = up[some], down[some]
        there = on(device, mine[0]), on(device, mine[1])
        total += launch_experts(*asked, *there, first).cpu()
        referred += stacked_mlp(x, chosen, shares, *mine, first)
    for found in (total, referred):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


def test_no_rows_are_no_trouble(device: str) -> None:
    up = on(device, stacked(2 * WIDTH, HIDDEN, 0, torch.float32))
    down = on(device, stacked(HIDDEN, WIDTH, 0, torch.float32))
    chosen = torch.zeros(0, 2, dtype=torch.int64, device=device)
    x = torch.zeros(0, HIDDEN, device=device)
    assert launch_experts(x, chosen, chosen.float(), up, down, 0).shape == (0, HIDDEN)


@pytest.mark.more
@pytest.mark.skipif(HAS_GPU, reason="the network is on the CPU")
def test_a_network_answers_alike_by_the_kernel(
    checkpoint: Callable[..., Path],
) -> None:
    prompt = [*range(5, 30)]

    def answers(ops: Ops) -> torch.Tensor:
        session = Session(load(checkpoint("qwen3_vl_moe"), ops), prompt, [], page_size=16)
        return torch.cat([session.prefill(), session.decode(41)[None]])

    wanted, launched = answers(Ops()), list[int]()
    launch = launch_experts

    def note(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        launched.append(len(x))
        return launch(x, *rest)

    class OneKernel(Ops):
        stacks = True

        def stacked_mlp(self, *given: Any) -> torch.Tensor:
            return note(*given)

    torch.testing.assert_close(answers(OneKernel()), wanted, atol=2e-4, rtol=0)
    assert launched == [25, 25, 1, 1], "two of three layers have experts"
