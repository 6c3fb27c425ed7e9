"""On a GPU, kernels compute what float64 computes.

The rotary kernel's own tests (tests/kernels) run on the GPU too, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from saccade.kernels.attention import Context, Segments, paged_attention, varlen_attention, write_kv
from saccade.kernels.linear import Activation, linear, pack
from saccade.kernels.norm import rms_norm
from saccade.kernels.patchify import patchify

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HALVES = [torch.bfloat16, torch.float16]
EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_products_and_activations(
    cuda: torch.device, dtype: torch.dtype, activation: Activation
) -> None:
    x, weight, bias = (
        noise(70, 96).to(dtype),
        (noise(48, 96, seed=1) / 10).to(dtype),
        noise(48, seed=2).to(dtype),
    )
    ours = linear(x.to(cuda), pack(weight.to(cuda)), bias.to(cuda), activation)
    close(ours, EXACT[activation](F.linear(x.double(), weight.double(), bias.double())))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm(cuda: torch.device, dtype: torch.dtype) -> None:
    x, weight = (noise(33, 4, 72) * 3).to(dtype), noise(72, seed=1).to(dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(rms_norm(x.to(cuda), weight.to(cuda), 1e-6), wanted)


def test_patches_have_the_same_bits_as_on_the_cpu(cuda: torch.device) -> None:
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    mean, std = (
        torch.tensor(values) * 255.0 for values in ((0.481, 0.457, 0.408), (0.268, 0.261, 0.275))
    )
    ours = patchify(image.to(cuda), 16, 2, 2, mean.to(cuda), std.to(cuda), torch.float32)
    assert torch.equal(ours.cpu(), patchify(image, 16, 2, 2, mean, std, torch.float32))


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Each segment's own attention, in float64."""
    parts = []
    for queries, keys, values in zip(*(x.double().split(lengths) for x in (q, k, v))):
        queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))
        parts.append(
            (torch.softmax(queries @ keys.transpose(1, 2) * scale, dim=-1) @ values).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[128], [64, 64, 16], [1, 300, 0, 7, 0], [4] * 40], ids=str)
@pytest.mark.parametrize("dim", [32, 36, 40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_variable_length_flash_attention(
    cuda: torch.device, dtype: torch.dtype, dim: int, lengths: list[int]
) -> None:
    fused = noise(sum(lengths), 9, dim).to(dtype)
    q, k, v = (fused[:, start : start + 3] for start in (0, 3, 6))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda)
    there = fused.to(cuda)
    a, b, c = (there[:, start : start + 3] for start in (0, 3, 6))
    ours = varlen_attention(a, b, c, Segments(bounds, max(lengths)), dim**-0.5, "flash")
    close(ours, attended(q, k, v, lengths, dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_by_sdpa(cuda: torch.device, dtype: torch.dtype) -> None:
    lengths = [64, 64, 9, 20]
    q, k, v = (noise(sum(lengths), 3, 40, seed=seed).to(dtype) for seed in range(3))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda)
    segments = Segments(bounds, max(lengths))
    ours = varlen_attention(q.to(cuda), k.to(cuda), v.to(cuda), segments, 0.2, "sdpa")
    close(ours, attended(q, k, v, lengths, 0.2))


@pytest.mark.parametrize("run", [True, False], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(("length", "keys"), [(1, 40), (5, 40), (40, 40), (1, 3000), (150, 700)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_causal_attention_over_pages(
    cuda: torch.device, dtype: torch.dtype, dim: int, length: int, keys: int, run: bool
) -> None:
    heads, kv_heads = 6, 2
    q, k, v = (
        noise(length, heads, dim).to(dtype),
        noise(keys, kv_heads, dim, seed=1).to(dtype),
        noise(keys, kv_heads, dim, seed=2).to(dtype),
    )
    slots = (
        torch.arange(5, 5 + keys)
        if run
        else torch.randperm(keys + 60, generator=torch.Generator().manual_seed(3))[:keys]
    )
    caches = [
        torch.full((keys + 60, kv_heads, dim), torch.nan, dtype=dtype, device=cuda)
        for _ in range(2)
    ]
    write_kv(k.to(cuda), v.to(cuda), caches[0], caches[1], slots.to(cuda))
    context = Context(
        start=0, length=length, kv_length=keys, slots=slots.to(cuda), run=5 if run else -1
    )
    ours = paged_attention(q.to(cuda), caches[0], caches[1], [context], dim**-0.5)
    wide = [x.double().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (k, v)]
    scores = q.double().transpose(0, 1) @ wide[0].transpose(1, 2) * dim**-0.5
    scores.masked_fill_(
        torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1), -torch.inf
    )
    close(ours, (torch.softmax(scores, dim=-1) @ wide[1]).transpose(0, 1))
