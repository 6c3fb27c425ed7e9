"""The launches whose machine code `aot.py` looks at: each kernel at the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lab.aot import Case, Promise
from saccade.kernels import paged_gpu
from saccade.kernels.paged import PagedCache, PagedRows

HALF = torch.bfloat16
PAGE = 16


def _rows(lengths: Sequence[int], singles: int) -> PagedRows:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    count = len(lengths)
    table = torch.zeros((count, 64), dtype=torch.int32)
    lines = torch.zeros(count, dtype=torch.int64)
    return PagedRows(starts, torch.ones(count, dtype=torch.int32), lines, table, PAGE, singles)


def _paged(heads: int, kv_heads: int, dim: int, kept: torch.dtype = HALF) -> None:
    """Decode at batch 1 (split keys) and 64 (whole), and a prefill chunk."""
    cache = PagedCache(*(torch.empty((1024, kv_heads, dim), dtype=kept) for _ in "kv"))
    for count, singles in ((1, 1), (64, 64), (64, 0)):
        q = torch.empty((count, heads, dim), dtype=HALF)
        lengths = [1] * singles if singles else [count]
        paged_gpu.launch_paged(q, cache, _rows(lengths, singles), 0.1)


def cases() -> Iterator[Case]:
    """Shapes: Qwen3-VL-8B and Qwen2.5-VL-7B, and other sizes of heads."""
    promises = {
        "_decode": Promise(),
        "_merge": Promise(access=4),  # one row of a few hundred bytes
        "_prefill": Promise(hgmma=True),
    }
    for heads, kv_heads, dim in ((32, 8, 128), (28, 4, 128), (16, 2, 128), (16, 8, 64)):
        name = f"paged attention {heads}/{kv_heads} heads of {dim}"
        yield Case(name, paged_gpu, partial(_paged, heads, kv_heads, dim), promises)
    eight = partial(_paged, 32, 8, 128, torch.float8_e4m3fn)
    yield Case("paged attention 32/8 heads of 128, 8-bit cache", paged_gpu, eight, promises)
