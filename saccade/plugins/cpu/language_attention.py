"""Attention of the language model in bfloat16 on x86 CPUs.

On CPUs with AMX or AVX512-BF16, compiled code (`attention.py`) handles all requests, with a KV
cache in bfloat16 or FP8. Requests with few tokens in a step read KV pages in place. On other CPUs,
a Numba kernel (`paged.py`) handles decoding requests, and PyTorch handles prompts.
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
    """Attention that handles adjacent requests of a batch in one call where it can."""

    def __init__(self, shape: PagedShape) -> None:
        super().__init__(shape, attention.softmax)
        self._compiled = shape.halves
        takes = attention.takes(torch.empty(0, shape.head_dim, dtype=shape.dtype))
        self._takes = takes and shape.kept in attention.KV_DTYPES
        if self._takes and (kind := attention.best_isa()):
            # compile now; otherwise the first prompt would wait
            attention.functions(shape.head_dim, kind, shape.kept)

    def _shared(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        if self._takes:
            return self._few(host, first) or self._prompts(host, first)
        return self._decoding(host, first) if self._compiled else super()._shared(host, first)

    def _few(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Return the end of the requests from `first` on that have few tokens each, and the call
        for them, which reads KV pages in place.

        Returns `None` if the first request has many tokens.
        """
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
        # the step consists of these rows only, each with one token, and a window excludes none
        singles = end - first == host.starts[-1] == len(host.rows.kv_lengths)
        tables: dict[int, torch.Tensor] = {}  # by the number of query heads per key head

        def attend(q: torch.Tensor, kv: PagedCache) -> torch.Tensor:
            q = q if q.stride(2) == 1 else q.contiguous()
            scale = self._shape.scale * kv.key_scale
            group = q.shape[1] // kv.keys.shape[1]
            if group not in tables and singles:  # computed from the batch, so it can be captured
                tables[group] = decode_blocks(host.rows)
            elif group not in tables:
                tables[group] = attention.paged_blocks(rows, group)
            return attention.attend_pages(q, kv, tables[group], host.rows, scale)

        return end, attend

    def _decoding(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Return the end of the requests from `first` on that have one token each, and the call for
        them.

        Returns `None` if the first request has several tokens.
        """
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
        """Return the end of the requests from `first` on that have many tokens each, and the call
        for them.

        Returns `None` if the first request has few tokens.
        """
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
        # by the number of query heads per key head
        lay_out = cache(partial(attention.causal_layout, rows, places))

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
