"""FlashAttention-3 for prefill over pages, with Triton's kernel for decode. The launches depend
only on the shape of a step, so steps can be captured in CUDA graphs.

NOT YET RUN on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape
from saccade.plugins.gpu.libraries.installed import load_fa3
from saccade.plugins.gpu.triton.paged_decode import launch_decode, share_keys


class Fa3Attention:
    """Runs FlashAttention-3. Implements `kernels.reference.paged.AttentionBackend`.

    Heads have at most 256 values, in multiples of 8. Keys and values have the dtype of the queries,
    which must be a 16-bit dtype.
    """

    def __init__(self, shape: PagedShape) -> None:
        assert shape.kept == shape.dtype and shape.head_dim % 8 == 0 and shape.head_dim <= 256
        self._attend = load_fa3("flash_attn_with_kvcache")
        self._shape = shape
        self._rows: PagedRows | None = None
        self._pages = torch.empty((0, 0), dtype=torch.int32)  # of prefill rows, [R, pages]
        self._starts = torch.empty(0, dtype=torch.int32)  # [R + 1], relative to the first of them

    def plan(self, rows: PagedRows) -> None:
        first = rows.singles
        work = share_keys(rows, self._shape.kv_heads) if first else None
        self._rows = replace(rows, work=work)
        # It expects one row of the page table per sequence, without an index in between.
        self._pages = rows.page_table.index_select(0, rows.lines[first:])
        self._starts = rows.q_starts[first:] - first

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        rows, shape = self._rows, self._shape
        assert rows is not None, "a step is planned first"
        first = rows.singles
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if first:
            launch_decode(q, cache, rows, shape.scale, out)
        if len(q) > first:
            in_pages = (-1, shape.page_size, shape.kv_heads, shape.head_dim)
            out[first:] = self._attend(
                q[first:],
                cache.keys.view(in_pages),
                cache.values.view(in_pages),
                cache_seqlens=rows.kv_lengths[first:],
                page_table=self._pages,
                cu_seqlens_q=self._starts,
                max_seqlen_q=len(q) - first,  # an upper bound: the lengths are on the device
                softmax_scale=shape.scale,
                causal=True,  # aligned to the lower right corner
            )
        return out
