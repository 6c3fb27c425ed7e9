"""A row of padding, which start-up runs alone, sees nothing in any backend for CPUs."""

from __future__ import annotations

import torch

from saccade.kernels.reference.paged import PagedRows, PagedShape, plain_cache
from saccade.kernels.reference.sdpa import SdpaAttention


def test_a_row_without_keys_attends_to_nothing() -> None:
    backend = SdpaAttention(PagedShape(2, 16, 16, torch.float32, torch.float32))
    zero = torch.zeros(1, dtype=torch.int32)
    rows = PagedRows(
        torch.tensor([0, 1], dtype=torch.int32), zero, zero.long(), zero[None], 16, singles=1
    )
    backend.plan(rows)
    cache = plain_cache(torch.ones(16, 2, 16), torch.ones(16, 2, 16))
    attended = backend(torch.ones(1, 4, 16), cache)
    assert torch.equal(attended, torch.zeros(1, 4, 16))
