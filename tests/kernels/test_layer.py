"""The kernels between a layer's products beside what CPUs run, without a GPU in Triton's
interpreter.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.layer import (
    QKNorm,
    add_layer_norm,
    add_rms_norm,
    gate,
    rope_and_cache,
)
from saccade.kernels.reference.paged import PagedCache, plain_cache
from saccade.kernels.reference.rotary import Pairs, Rotation, rotary_tables

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.activation import GATES
from saccade.plugins.gpu.triton.layer import (
    launch_add_norm,
    launch_gate,
    launch_rope_and_cache,
)
from tests.helpers.tensors import noise
from tests.kernels.conftest import bounds, broad

TOLERANCE = bounds(4e-6, 4e-3)


SHAPES = [
    *((4, 2, 64, 64), (7, 1, 72, 72), (3, 3, 80, 40)),
    *((5, 1, 96, 96), (32, 8, 128, 128), (2, 1, 16, 16)),
    (8, 1, 512, 512),
]
"""Heads, key heads, their values, and how many of these are turned."""


@pytest.mark.parametrize(
    ("shape", "dtype", "normed", "pairs"),
    broad(
        product(SHAPES, TOLERANCE, (True, False), ("halves", "neighbours")),
        keep=[
            (SHAPES[0], torch.float32, True, "neighbours"),
            (SHAPES[1], torch.float16, False, "halves"),
            (SHAPES[2], torch.float32, True, "halves"),
            (SHAPES[2], torch.float16, False, "neighbours"),
            (SHAPES[3], torch.float16, True, "neighbours"),
            (SHAPES[5], torch.float32, False, "halves"),
        ],
    ),
)
def test_queries_and_keys_are_turned_and_cached(
    device: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    normed: bool,
    pairs: Pairs,
) -> None:
    heads, kv_heads, dim, turned = shape
    tokens, slots = 5, torch.tensor([3, 9, 1, 7, 30])
    qkv = noise(tokens, heads + 2 * kv_heads, dim).to(dtype)
    norm = (
        QKNorm(1 + 0.1 * noise(heads + kv_heads, dim, seed=1).to(dtype), 1e-6) if normed else None
    )
    rotation = Rotation(*rotary_tables(10 * noise(tokens, turned // 2, seed=2), pairs), pairs=pairs)
    empty = torch.zeros(32, kv_heads, dim, dtype=dtype)
    wanted = empty, empty.clone()
    queries = rope_and_cache(qkv.clone(), kv_heads, rotation, norm, plain_cache(*wanted), slots)
    cache = torch.zeros_like(empty, device=device), torch.zeros_like(empty, device=device)
    weight = None if norm is None else QKNorm(norm.weight.to(device), norm.eps)
    ours = launch_rope_and_cache(
        qkv.to(device),
        kv_heads,
        rotation.cos.to(device),
        rotation.sin.to(device),
        weight,
        plain_cache(*cache),
        slots.to(device),
        halves=pairs == "halves",
    )
    for mine, its in ((ours, queries), *zip(cache, wanted)):
        torch.testing.assert_close(mine.cpu(), its, atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.003)])
def test_a_cache_may_hold_eight_bits(device: str, scales: tuple[float, float]) -> None:
    """With the scales, some values are beyond what eight bits hold: they become the largest."""
    qkv = noise(3, 6, 16).half()
    slots = torch.tensor([2, 0, 1])
    cos, sin = rotary_tables(torch.zeros(3, 8))
    wanted = eight_bits("cpu", scales)
    queries = rope_and_cache(qkv.clone(), 2, Rotation(cos, sin), None, wanted, slots)
    ours = eight_bits(device, scales)
    mine = launch_rope_and_cache(
        qkv.to(device), 2, cos.to(device), sin.to(device), None, ours, slots.to(device), halves=True
    )
    assert torch.equal(mine.cpu(), queries)
    for kept, expected in ((ours.keys, wanted.keys), (ours.values, wanted.values)):
        torch.testing.assert_close(kept.cpu().float(), expected.float(), rtol=0, atol=1e-6)
    assert torch.allclose(wanted.keys[slots].float() * scales[0], qkv[:, 2:4].float(), rtol=0.07)
    assert (wanted.values.float().abs().max() == 448) == (scales[1] < 0.01)


def eight_bits(device: str, scales: tuple[float, float]) -> PagedCache:
    empty = torch.zeros(4, 2, 16, dtype=torch.float8_e4m3fn, device=device)
    return plain_cache(empty, empty.clone(), *scales)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [16, 72, 1152, 4096])
def test_a_stream_is_added_to_and_normalised(device: str, size: int, dtype: torch.dtype) -> None:
    x, delta = noise(3, size).to(dtype), noise(3, size, seed=1).to(dtype)
    weight, bias = 1 + noise(size, seed=2).to(dtype), noise(size, seed=3).to(dtype)
    there = [each.to(device) for each in (x, delta, weight, bias)]
    total, normed = add_rms_norm(x, delta, weight, 1e-6)
    ours = launch_add_norm(there[0], there[1], there[2], None, 1e-6)
    assert torch.equal(ours[0].cpu(), total)
    torch.testing.assert_close(ours[1].cpu(), normed, atol=TOLERANCE[dtype], rtol=2e-3)
    total, normed = add_layer_norm(x, delta, weight, bias, 1e-6)
    ours = launch_add_norm(there[0], there[1], there[2], there[3], 1e-6)
    assert torch.equal(ours[0].cpu(), total)
    torch.testing.assert_close(ours[1].cpu(), normed, atol=2 * TOLERANCE[dtype], rtol=2e-3)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [16, 100, 3420])
@pytest.mark.parametrize("act", GATES)
def test_a_gate_is_applied(device: str, size: int, dtype: torch.dtype, act: Activation) -> None:
    both = 3 * noise(3, 2 * size).to(dtype)
    ours = launch_gate(both.to(device), act).cpu()
    torch.testing.assert_close(ours, gate(both, act), atol=3 * TOLERANCE[dtype], rtol=2e-3)


def test_no_rows_are_no_trouble(device: str) -> None:
    none = torch.empty(0, 32, device=device)
    assert launch_gate(none, "silu").shape == (0, 16)
    total, normed = launch_add_norm(none, none, torch.ones(32, device=device), None, 1e-6)
    assert total.shape == normed.shape == (0, 32)
