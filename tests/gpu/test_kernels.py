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

from saccade.kernels.language_attention import possible
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.paged import PagedRows, PagedShape, plain_cache
from saccade.kernels.reference.patchify import patchify
from saccade.kernels.reference.rotary import Rotation, rotary_tables
from saccade.kernels.reference.segments import Segments
from saccade.nn.protocol import Batch
from saccade.plugins.gpu.libraries.installed import find_fa3
from saccade.plugins.gpu.tower_attention import TOWERS
from saccade.plugins.gpu.triton.language_attention import ATTENTION
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.runtime.attention import attention_for
from tests.helpers.tensors import noise

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
    ours = TritonOps().dense_linear(x.to(cuda), weight.to(cuda), bias.to(cuda), activation)
    close(ours, EXACT[activation](F.linear(x.double(), weight.double(), bias.double())))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm(cuda: torch.device, dtype: torch.dtype) -> None:
    x, weight = (noise(33, 4, 72) * 3).to(dtype), noise(72, seed=1).to(dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(TritonOps().rms_norm(x.to(cuda), weight.to(cuda), 1e-6), wanted)


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
@pytest.mark.parametrize("backend", ["flash", "fa3", "fa4"])
def test_variable_length_attention_of_libraries(
    cuda: torch.device, backend: str, dtype: torch.dtype, dim: int, lengths: list[int]
) -> None:
    if backend == "fa3" and find_fa3() is None:
        pytest.skip("FlashAttention-3 is not installed")
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    fused = noise(sum(lengths), 9, dim).to(dtype)
    q, k, v = (fused[:, start : start + 3] for start in (0, 3, 6))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda)
    there = fused.to(cuda)
    a, b, c = (there[:, start : start + 3] for start in (0, 3, 6))
    ours = TOWERS[backend](a, b, c, Segments(bounds, max(lengths)), dim**-0.5)
    close(ours, attended(q, k, v, lengths, dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_by_sdpa(cuda: torch.device, dtype: torch.dtype) -> None:
    lengths = [64, 64, 9, 20]
    q, k, v = (noise(sum(lengths), 3, 40, seed=seed).to(dtype) for seed in range(3))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda)
    segments = Segments(bounds, max(lengths))
    ours = TOWERS["sdpa"](q.to(cuda), k.to(cuda), v.to(cuda), segments, 0.2)
    close(ours, attended(q, k, v, lengths, 0.2))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "rows",
    [[(1, 40)], [(40, 40), (7, 7)], [(1, 3000)], [(1, 1), (5, 40), (150, 700), (1, 16), (3, 3)]],
    ids=str,
)
@pytest.mark.parametrize("dim", [16, 20, 64, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_causal_attention_over_pages(
    cuda: torch.device, dtype: torch.dtype, dim: int, rows: list[tuple[int, int]], page_size: int
) -> None:
    """Rows of (queries, tokens in all), on pages anywhere."""
    heads, kv_heads = 6, 2
    counts = [-(-total // page_size) for _, total in rows]
    order = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(3)).int()
    table = torch.full((len(rows) + 1, max(counts)), 1 << 30, dtype=torch.int32)
    caches = torch.full(
        (2, len(order) * page_size, kv_heads, dim), torch.nan, dtype=dtype, device=cuda
    )
    wanted, queries, new, out_slots, used = [], [], [], [], 0
    for line, ((length, total), count) in enumerate(zip(rows, counts)):
        pages = table[line + 1, :count] = order[used : used + count]
        used += count
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:total].long()
        q = noise(length, heads, dim, seed=line).to(dtype)
        kv = [noise(total, kv_heads, dim, seed=10 * line + n).to(dtype) for n in (1, 2)]
        for cache, x in zip(caches, kv):
            cache[slots[: total - length].to(cuda)] = x[: total - length].to(cuda)
        queries.append(q)
        new.append([x[total - length :] for x in kv])
        out_slots.append(slots[total - length :])
        wide = [x.double().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in kv]
        scores = q.double().transpose(0, 1) @ wide[0].transpose(1, 2) * dim**-0.5
        future = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
        weights = torch.softmax(scores.masked_fill_(future, -torch.inf), dim=-1)
        wanted.append((weights @ wide[1]).transpose(0, 1))
    lengths, totals = zip(*rows)
    none = torch.empty(0, dtype=torch.int64, device=cuda)
    batch = Batch(
        tokens=torch.zeros(sum(lengths), dtype=torch.int64, device=cuda),
        positions=none,
        out_slots=torch.cat(out_slots).to(cuda),
        slots=torch.arange(1, len(rows) + 1, device=cuda),
        page_table=table.to(cuda),
        q_starts=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda),
        kv_lengths=torch.tensor(totals, dtype=torch.int32, device=cuda),
        singles=0,
        splice_rows=none,
        embeddings=none,
        sample_rows=none,
    )
    attention = attention_for({0: (caches[0], caches[1])}, page_size)
    attention.plan(batch)
    k, v = (torch.cat(x).to(cuda) for x in zip(*new))
    qkv = torch.cat((torch.cat(queries).to(cuda), k, v), dim=1)
    still = Rotation(*rotary_tables(torch.zeros(len(qkv), dim // 2, device=cuda)))
    close(attention(qkv, still, None, 0), torch.cat(wanted))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("singles", [0, 3])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(16, 2), (28, 4)], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_attention_of_libraries_over_pages_is_tritons(
    cuda: torch.device,
    name: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    singles: int,
    page_size: int,
) -> None:
    if name not in possible(ATTENTION, cuda, dtype):
        pytest.skip(f"{name} does not run here")
    tokens, keys = [*[1] * singles, 40, 7], [*[3000, 1, 70][:singles], 640, 7]
    counts = [-(-each // page_size) for each in keys]
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).int()
    table = torch.zeros((len(keys), max(counts)), dtype=torch.int32)
    for line, pages in zip(table, order.split(counts)):
        line[: len(pages)] = pages
    rows = PagedRows(
        torch.tensor([0, *np.cumsum(tokens)], dtype=torch.int32, device=cuda),
        torch.tensor(keys, dtype=torch.int32, device=cuda),
        torch.arange(len(keys), device=cuda),
        table.to(cuda),
        page_size,
        singles,
    )
    slots = (1 + sum(counts)) * page_size
    k, v = (noise(slots, heads[1], dim, seed=seed).to(dtype).to(cuda) for seed in (1, 2))
    q = noise(sum(tokens), heads[0], dim).to(dtype).to(cuda)
    shape = PagedShape(heads[1], dim, page_size, dtype, dtype)
    found = []
    for each in (name, "triton"):
        backend = ATTENTION[each].make(shape)
        backend.plan(rows)
        found.append(backend(q, plain_cache(k, v)))
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)
