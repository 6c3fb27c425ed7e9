"""Attention in blocks of queries against float64, and where it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.kernels.reference import attention
from saccade.kernels.reference import long_attention as blockwise
from saccade.kernels.reference.segments import Segments, sdpa_segments
from tests.kernels.test_attention import expected

DIM = 16
SCALE = DIM**-0.5


def drawn(length: int, keys: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(length, heads, DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, keys, kv_heads, DIM, generator=generator).bfloat16()
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (5, 5), (12, 12), (13, 30), (9, 100)])
def test_blocks_are_exact_but_for_weights_and_answer(
    length: int, keys: int, group: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_QUERIES", (2, 12))
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", 200)
    q, k, v = drawn(length, keys, 3 * group, 3)
    mask = torch.ones(length, keys, dtype=torch.bool)
    wanted = expected(q, k, v, mask.tril(keys - length) if causal else mask)
    others = torch.randn(2, 40, 40)
    before = others[0] @ others[1]
    out = blockwise.attend(q, k.transpose(0, 1), v.transpose(0, 1), SCALE, causal=causal)
    assert out.dtype == torch.bfloat16
    assert torch.equal(others[0] @ others[1], before), "other products are what they were"
    # Weights and answers are rounded to bfloat16 once each, scaled queries where they must be.
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=0.0)


def test_long_segments_and_long_prompts_are_taken_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "has_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(blockwise, "MIN_QUERIES", 8)
    monkeypatch.setattr(blockwise, "MIN_KEYS", 8)
    taken: list[tuple[int, int]] = []
    attend = blockwise.attend

    def note(q: torch.Tensor, k: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        taken.append((len(q), k.shape[1]))
        return attend(q, k, *rest, **named)

    monkeypatch.setattr(blockwise, "attend", note)
    lengths = [9, 9, 3, 3, 20]
    q, k, v = drawn(sum(lengths), sum(lengths), 3, 3)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    own = Segments(bounds, max(lengths))
    out = sdpa_segments(q, k, v, own, SCALE)
    wanted = expected(q, k, v, owner[:, None] == owner[None])
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=0.0)
    assert taken == [(9, 9), (9, 9), (20, 20)]

    part = Segments(torch.tensor([0, 12], dtype=torch.int32), 12)
    sdpa_segments(q[:12], k, v, part, SCALE)
    keys, values = (each.transpose(0, 1).unsqueeze(0) for each in (k, v))
    attention.causal_attention(q[-10:], keys, values, SCALE)
    attention.causal_attention(q[-2:], keys, values, SCALE)
    assert taken[3:] == [(12, 44), (10, 44)]
    full = attention.causal_attention(q[-10:].float(), keys.float(), values.float(), SCALE)
    assert full.dtype == torch.float32 and len(taken) == 5, "other dtypes go PyTorch's way"
