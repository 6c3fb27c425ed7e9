"""Rotary embedding against float64: what CPUs run, and the Triton kernel (without a GPU, in
Triton's interpreter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from saccade.kernels.reference.rotary import Pairs, Rotation, rotary_tables, rotate_, section_axes
from tests.helpers.tensors import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HEAD_SIZES = [32, 40, 64, 72, 80, 96, 128, 256]
Rotate = Callable[..., None]


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("triton", marks=[pytest.mark.gpu] if DEVICE == "cuda" else [])],
)
def rotate(request: pytest.FixtureRequest) -> Rotate:
    """Each implementation in turn."""
    if request.param == "torch":
        return rotate_
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from saccade.plugins.gpu.triton.rotary import launch

    def launched(rotation: Rotation, x: torch.Tensor) -> None:
        tables = (rotation.cos, rotation.sin, rotation.index, rotation.axis)
        launch(x, *tables, halves=rotation.pairs == "halves")

    return launched


@pytest.fixture
def device(rotate: Rotate) -> str:
    return "cpu" if rotate is rotate_ else DEVICE


def turned(x: torch.Tensor, angles: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """x [T, H, D] with its first 2 * angles.shape[1] values turned by `angles` [T, R / 2], in
    float64.
    """
    size = 2 * angles.shape[1]
    part = x[..., :size].double()
    split = (
        torch.stack(part.chunk(2, dim=-1), dim=-1)
        if pairs == "halves"
        else part.unflatten(-1, (-1, 2))
    )
    spun = torch.view_as_complex(split.contiguous()) * torch.polar(
        torch.ones(()).double(), angles.double()[:, None]
    )
    parts = torch.view_as_real(spun)
    joined = (
        torch.cat((parts[..., 0], parts[..., 1]), dim=-1)
        if pairs == "halves"
        else parts.flatten(-2)
    )
    return torch.cat((joined, x[..., size:].double()), dim=-1)


def check(
    rotate: Rotate,
    device: str,
    rotation: Rotation,
    angles: torch.Tensor,
    dtype: torch.dtype,
    dim: int,
) -> None:
    """`rotation` turns heads, a part of one larger tensor, by `angles`, and touches nothing
    else.
    """
    fused = noise(angles.shape[0], 9, dim, seed=1).to(dtype).to(device)
    before = fused.cpu().clone()
    parts: dict[str, Any] = {
        name: part.to(device)
        for name in ("cos", "sin", "index", "axis")
        if (part := getattr(rotation, name)) is not None
    }
    rotate(replace(rotation, **parts), fused[:, 1:7])
    wanted = before.double()
    wanted[:, 1:7] = turned(before[:, 1:7], angles, rotation.pairs)
    assert fused.dtype == dtype
    torch.testing.assert_close(fused.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=0.0)
    assert torch.equal(fused[:, 0].cpu(), before[:, 0]) and torch.equal(
        fused[:, 7:].cpu(), before[:, 7:]
    )


@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_each_pair_is_turned_by_its_angle(
    rotate: Rotate, device: str, dim: int, dtype: torch.dtype, pairs: Pairs
) -> None:
    angles = noise(7, dim // 2) * 10
    check(rotate, device, Rotation(*rotary_tables(angles, pairs), pairs=pairs), angles, dtype, dim)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_positions_may_be_places_in_a_table(
    rotate: Rotate, device: str, dim: int, pairs: Pairs
) -> None:
    table = noise(50, dim // 2) * 10
    index = torch.randint(0, 50, (1, 7), generator=torch.Generator().manual_seed(2))
    check(
        rotate,
        device,
        Rotation(*rotary_tables(table, pairs), index=index, pairs=pairs),
        table[index[0]],
        torch.float32,
        dim,
    )


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "sections"), [(128, (16, 24, 24)), (128, (24, 20, 20)), (40, (8, 6, 6)), (72, (18, 18))]
)
def test_sections_take_positions_of_their_own_axes(
    rotate: Rotate,
    device: str,
    dim: int,
    sections: tuple[int, ...],
    interleaved: bool,
    pairs: Pairs,
) -> None:
    table = noise(50, dim // 2) * 10
    index = torch.randint(0, 50, (len(sections), 7), generator=torch.Generator().manual_seed(3))
    axis = section_axes(sections, interleaved=interleaved)
    angles = torch.stack([table[index[a], j] for j, a in enumerate(axis.tolist())], dim=1)
    check(
        rotate,
        device,
        Rotation(*rotary_tables(table, pairs), index, axis, pairs),
        angles,
        torch.float32,
        dim,
    )


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize(("dim", "size"), [(64, 32), (128, 40), (96, 18)])
def test_the_rest_of_a_head_may_stay_as_it_is(
    rotate: Rotate, device: str, dim: int, size: int, pairs: Pairs
) -> None:
    angles = noise(7, size // 2) * 10
    check(
        rotate,
        device,
        Rotation(*rotary_tables(angles, pairs), pairs=pairs),
        angles,
        torch.float32,
        dim,
    )


@pytest.mark.first
def test_rows_and_heads_beyond_one_block(rotate: Rotate, device: str) -> None:
    angles = noise(70, 20) * 10
    x = noise(70, 130, 40, seed=1)
    mine = x.to(device, copy=True)
    cos, sin = rotary_tables(angles)
    rotate(Rotation(cos.to(device), sin.to(device)), mine)
    torch.testing.assert_close(
        mine.cpu().double(), turned(x, angles, "halves"), atol=4e-6, rtol=0.0
    )


def test_no_rows_are_no_trouble(rotate: Rotate, device: str) -> None:
    cos, sin = rotary_tables(noise(0, 16))
    rotate(
        Rotation(cos.to(device), sin.to(device)),
        torch.empty(0, 3, 32, device=device),
    )


def test_interleaved_sections_are_those_of_qwen3_vl() -> None:
    axis = section_axes((24, 20, 20), interleaved=True).tolist()
    assert axis[:60] == [0, 1, 2] * 20 and axis[60:] == [0] * 4
    assert section_axes((2, 3, 3), interleaved=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
