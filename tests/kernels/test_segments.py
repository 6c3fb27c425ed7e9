"""The vision tower's attention kernel beside float64, without a GPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from saccade.plugins.gpu.triton import segments as segments_gpu
from saccade.plugins.gpu.triton.attention import HeadTiling, Tile
from saccade.plugins.gpu.triton.segments import launch_segments
from tests.helpers.tensors import noise
from tests.kernels.conftest import bounds, broad

TOLERANCE = bounds(2e-6, 2e-3)
SMALL = Tile(rows=16, keys=16, warps=4, stages=1)


def bounds_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One segment in float64."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())


@pytest.mark.first
@pytest.mark.parametrize(
    ("dim", "dtype"),
    broad(
        product((16, 40, 64, 72, 80, 96, 128, 256), TOLERANCE),
        keep=[(16, torch.float16), (72, torch.float32), (80, torch.float16), (256, torch.float32)],
    ),
)
def test_rows_see_their_segment_and_nothing_else(device: str, dim: int, dtype: torch.dtype) -> None:
    lengths = [35, 0, 16, 1]
    fused = noise(sum(lengths), 6, dim).to(dtype).to(device)
    q, k, v = fused[:, :2], fused[:, 2:4], fused[:, 4:]
    bounds = bounds_of(lengths).to(device)
    ours = launch_segments(q, k, v, bounds, bounds, max(lengths), dim**-0.5, tile=SMALL)
    parts = [x.cpu().split(lengths) for x in (q, k, v)]
    wanted = torch.cat([attended(a, b, c, dim**-0.5) for a, b, c in zip(*parts)])
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128])
def test_long_segments(device: str, dim: int) -> None:
    lengths = [1100, 0, 1, 5000, 63]
    q, k, v = noise(sum(lengths), 3, dim).to(device).split(1, dim=1)
    bounds = bounds_of(lengths).to(device)
    ours = launch_segments(q, k, v, bounds, bounds, max(lengths), dim**-0.5)
    parts = [x.cpu().split(lengths) for x in (q, k, v)]
    wanted = torch.cat([attended(a, b, c, dim**-0.5) for a, b, c in zip(*parts)])
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=TOLERANCE[torch.float32], rtol=0.0)


def test_a_cut_of_rows_sees_all_keys_of_its_segment(device: str) -> None:
    q, k, v = (noise(n, 2, 32, seed=n).to(device) for n in (20, 70, 70))
    q_bounds, k_bounds = bounds_of([20]).to(device), bounds_of([70]).to(device)
    ours = launch_segments(q, k, v, q_bounds, k_bounds, 20, 0.2)
    wanted = attended(q.cpu(), k.cpu(), v.cpu(), 0.2)
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=TOLERANCE[torch.float32], rtol=0.0)


@pytest.mark.parametrize("dtype", [each for each in TOLERANCE if each.itemsize == 2])
@pytest.mark.parametrize("longest", [64, 130])
def test_the_tiles_of_the_device(device: str, longest: int, dtype: torch.dtype) -> None:
    q, k, v = noise(longest, 3, 72).to(dtype).to(device).chunk(3, dim=1)
    bounds = bounds_of([longest]).to(device)
    ours = launch_segments(q, k, v, bounds, bounds, longest, 0.1)
    wanted = attended(q.cpu(), k.cpu(), v.cpu(), 0.1)
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=0.0)


def test_heads_are_cut_so_that_few_columns_are_padding() -> None:
    cost = {dim: HeadTiling.of(dim) for dim in (8, 16, 40, 64, 72, 80, 96, 120, 128, 256)}
    assert {dim: cut.d0 + cut.d1 for dim, cut in cost.items()} == {
        8: 16, 16: 16, 40: 48, 64: 64, 72: 80, 80: 80, 96: 96, 120: 128, 128: 128, 256: 256
    }  # fmt: skip
    assert cost[72] == HeadTiling(72, 64, 16) and cost[128] == HeadTiling(128, 128, 0)


def test_room_for_segments_costs_a_program_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of 8,192 patches has room for 520 segments of 1,025 rows, of which 8 are there."""
    grids: list[tuple[int, ...]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    for kernel in ("_list", "_attend"):
        monkeypatch.setattr(segments_gpu, kernel, Counted())
    q = torch.empty(8200, 16, 64, dtype=torch.float16)
    bounds = torch.zeros(521, dtype=torch.int32)
    launch_segments(q, q, q, bounds, bounds, 1025, 0.1)
    assert grids == [(17,), ((8200 // 128 + 520) * 16,)], "9,344 programs, once 74,880"


def test_blocks_of_segments_are_listed_without_a_gap(device: str) -> None:
    """Of more segments than one program of the list looks at, most of them empty."""
    lengths = [0] * 33 + [35, 0, 16, 1] + [0] * 9 + [20, 0]
    q, k, v = (noise(sum(lengths), 2, 16, seed=seed).to(device) for seed in range(3))
    bounds = bounds_of(lengths).to(device)
    ours = launch_segments(q, k, v, bounds, bounds, 35, 0.25, tile=SMALL)
    parts = [x.cpu().split(lengths) for x in (q, k, v)]
    wanted = torch.cat([attended(a, b, c, 0.25) for a, b, c in zip(*parts)])
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=TOLERANCE[torch.float32], rtol=0.0)
