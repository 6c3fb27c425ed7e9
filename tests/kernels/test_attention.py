"""Attention against float64, written out with explicit masks."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.reference.segments import Segments, sdpa_segments

DIM = 16
SCALE = DIM**-0.5


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [L, Hq, D], k, v [K, Hkv, D], mask [L, K] True where seen."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double())


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [8, 8, 3, 3, 3, 8, 1], [3, 0, 0, 5, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_see_themselves_only(lengths: list[int], dtype: torch.dtype) -> None:
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, 9, DIM, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .split(3, dim=1)
    )
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out = sdpa_segments(q, k, v, Segments(bounds, max(lengths)), SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.double(), expected(q, k, v, owner[:, None] == owner[None]), atol=tolerance, rtol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_part_of_a_segments_rows_sees_all_of_it(dtype: torch.dtype) -> None:
    q, k, v = (
        torch.randn(40, 9, DIM, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .split(3, dim=1)
    )
    segments = Segments(torch.tensor([0, 12], dtype=torch.int32), 12)
    out = sdpa_segments(q[8:20], k, v, segments, SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    mask = torch.ones(12, 40, dtype=torch.bool)
    torch.testing.assert_close(
        out.double(), expected(q[8:20], k, v, mask), atol=tolerance, rtol=0.0
    )
