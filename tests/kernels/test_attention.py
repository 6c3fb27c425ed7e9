"""Attention against float64, written out with explicit masks."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels import attention
from saccade.kernels.attention import Context, Segments, paged_attention, varlen_attention, write_kv

SLOTS, KV_HEADS, DIM = 96, 2, 16
SCALE = DIM**-0.5


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [L, Hq, D], k, v [K, Hkv, D], mask [L, K] True where seen."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double())


def make(
    lengths: list[tuple[int, int]], scattered: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """q, caches and contexts of sequences with (query rows, tokens in all)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(
        sum(length for length, _ in lengths), 3 * KV_HEADS, DIM, generator=generator
    ).to(dtype)
    caches = [torch.randn(SLOTS, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2)]
    order = torch.randperm(SLOTS, generator=generator) if scattered else torch.arange(SLOTS)
    contexts, start, used = [], 0, 0
    for length, total in lengths:
        contexts.append(
            Context(start, length, total, order[used : used + total], -1 if scattered else used)
        )
        start, used = start + length, used + total
    return q, *caches, tuple(contexts)


@pytest.mark.parametrize(
    "mask_values", [None, 1 << 20, 64], ids=["no mask", "one block", "many blocks"]
)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths", [[(1, 33)], [(20, 20)], [(9, 31)], [(1, 1), (1, 40), (7, 7), (5, 30)]]
)
def test_queries_see_their_own_past_and_nothing_else(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    scattered: bool,
    mask_values: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if mask_values is not None:
        monkeypatch.setattr(attention, "MERGING", ())
        monkeypatch.setattr(attention, "MASK_VALUES", mask_values)
    q, k_cache, v_cache, contexts = make(lengths, scattered, dtype)
    out = paged_attention(q, k_cache, v_cache, contexts, SCALE)
    assert out.dtype == dtype
    for context in contexts:
        rows = slice(context.start, context.start + context.length)
        mask = torch.ones(context.length, context.kv_length, dtype=torch.bool).tril(
            context.kv_length - context.length
        )
        wanted = expected(q[rows], k_cache[context.slots], v_cache[context.slots], mask)
        torch.testing.assert_close(
            out[rows].double(),
            wanted,
            **(
                {"atol": 1e-5, "rtol": 0.0}
                if dtype == torch.float32
                else {"atol": 2e-2, "rtol": 0.0}
            ),
        )


def test_what_lies_in_other_slots_does_not_matter() -> None:
    q, k_cache, v_cache, contexts = make([(4, 20), (1, 9)], True, torch.float32)
    before = paged_attention(q, k_cache, v_cache, contexts, SCALE)
    others = torch.ones(SLOTS, dtype=torch.bool)
    for context in contexts:
        others[context.slots] = False
    k_cache[others] = torch.nan
    v_cache[others] = torch.nan
    assert torch.equal(paged_attention(q, k_cache, v_cache, contexts, SCALE), before)


def test_keys_and_values_go_to_their_slots_only() -> None:
    k_cache, v_cache = torch.zeros(8, 2, 4), torch.zeros(8, 2, 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    slots = torch.tensor([6, 0, 3])
    write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots], k) and torch.equal(v_cache[slots], v)
    assert k_cache.count_nonzero() == k.numel() and v_cache.count_nonzero() == v.numel()


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
    out = varlen_attention(q, k, v, Segments(bounds, max(lengths)), SCALE, "sdpa")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.double(), expected(q, k, v, owner[:, None] == owner[None]), atol=tolerance, rtol=0.0
    )
