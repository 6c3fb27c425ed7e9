"""The language model's attention on x86 processors, in bfloat16: by LLVM's code (`attention.py`)
where the processor multiplies bfloat16 numbers. Rows with few tokens then read pages in place. A
cache in FP8 is read by the same code, so a row has its own bits there too.
Elsewhere rows that decode go by Numba's kernel (`paged.py`), and prompts by PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import torch

from saccade.kernels.language_attention import EVERYTHING, REFERENCE, LanguageAttention
from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape
from saccade.kernels.reference.sdpa import Attend, HostRows, SdpaAttention
from saccade.plugins.cpu import attention
from saccade.plugins.cpu.paged import decode_blocks, decode_paged


class X86Attention(SdpaAttention):
    """Attention where neighbours with one token each share a call."""

    def __init__(self, shape: PagedShape) -> None:
        super().__init__(shape, attention.softmax)
        self._compiled = shape.halves
        takes = attention.takes(torch.empty(0, shape.head_dim, dtype=shape.dtype))
        self._takes = takes and shape.kept in attention.KV_DTYPES
        if self._takes and (kind := attention.best_isa()):
            # or the first prompt would wait for them
            attention.functions(shape.head_dim, kind, shape.kept)

    def _shared(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        if self._takes:
            return self._few(host, first) or self._prompts(host, first)
        return self._decoding(host, first) if self._compiled else super()._shared(host, first)

    def _few(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Do as `_shared`, for rows with few tokens each, on this processor's best way."""
        begin, end, width = host.starts[first], first, host.rows.page_table.shape[1]
        rows = []
        while end < len(host.lengths):
            count = host.starts[end + 1] - host.starts[end]
            if count > attention.MAX_PAGED_QUERIES:
                break
            page = host.lines[end] * width
            rows.append((host.starts[end] - begin, count, page, host.lengths[end]))
            end += 1
        if end == first:
            return None
        # a step of nothing else, none of whose rows a window has cut off
        singles = end - first == host.starts[-1] == len(host.rows.kv_lengths)
        tables: dict[int, torch.Tensor] = {}  # by queries to a key

        def attend(q: torch.Tensor, kv: PagedCache) -> torch.Tensor:
            q = q if q.stride(2) == 1 else q.contiguous()
            scale = self._shape.scale * kv.key_scale
            group = q.shape[1] // kv.keys.shape[1]
            if group not in tables and singles:  # from the batch itself, as a recording needs
                tables[group] = decode_blocks(host.rows)
            elif group not in tables:
                tables[group] = attention.paged_blocks(rows, group)
            return attention.attend_pages(q, kv, tables[group], host.rows, scale)

        return end, attend

    def _decoding(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Do as `_shared`, for rows with one token each."""
        end, rows = host.decoding(first), host.rows
        if end == first:
            return None
        mine = PagedRows(
            rows.q_starts[first : end + 1],
            rows.kv_lengths[first:end],
            rows.lines[first:end],
            rows.page_table,
            rows.page_size,
            end - first,
        )

        def attend(q: torch.Tensor, kv: PagedCache) -> torch.Tensor:
            return decode_paged(q, kv, mine, self._shape.scale * kv.key_scale)

        return end, attend

    def _prompts(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Do as `_shared`, for rows with many tokens each."""
        table, size = host.rows.page_table.numpy(), self._shape.page_size
        begin, end = host.starts[first], first
        rows, places = [], []
        while end < len(host.lengths):
            count, keys = host.starts[end + 1] - host.starts[end], host.lengths[end]
            if count <= attention.MAX_PAGED_QUERIES:
                break
            rows.append((host.starts[end] - begin, count, keys))
            page, offset = np.divmod(np.arange(keys), size)
            places.append(table[host.lines[end]].astype(np.int64)[page] * size + offset)
            end += 1
        if end == first:
            return None
        lay_out = cache(partial(attention.causal_layout, rows, places))  # of a group of heads

        def attend(q: torch.Tensor, kv: PagedCache) -> torch.Tensor:
            q = q if q.stride(2) == 1 else q.contiguous()
            scale = self._shape.scale * kv.key_scale
            layout = lay_out(q.shape[1] // kv.keys.shape[1])
            return attention.attend(q, kv.keys, kv.values, layout, scale)

        return end, attend


ATTENTION: Mapping[str, LanguageAttention] = {
    "x86": LanguageAttention(
        X86Attention, captured=False, steady=lambda shape: shape.halves, knows=EVERYTHING
    ),
    **REFERENCE,
    "sdpa": LanguageAttention(
        partial(SdpaAttention, softmax=attention.softmax), captured=False, knows=EVERYTHING
    ),
}
