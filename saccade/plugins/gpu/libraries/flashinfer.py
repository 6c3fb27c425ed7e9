"""FlashInfer for decode over pages, with Triton's kernels for prefill. FlashInfer plans each step
on the host, which waits for the sequences' lengths, so steps cannot be captured in CUDA graphs.

NOT YET RUN on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape
from saccade.plugins.gpu.triton.paged import launch_prefill

WORKSPACE_BYTES = 128 << 20
"""Bytes of the workspace, as FlashInfer recommends. Start-up reserves them
(`engine/memory_estimate.py`).
"""


class FlashInferAttention:
    """Runs FlashInfer for decode. Implements `kernels.reference.paged.AttentionBackend`."""

    def __init__(self, shape: PagedShape) -> None:
        self._shape = shape
        self._wrapper: Any = None  # created by the first step that decodes
        self._rows: PagedRows | None = None
        self._planned = False

    def plan(self, rows: PagedRows) -> None:
        self._rows, self._planned = rows, False

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        rows, shape = self._rows, self._shape
        assert rows is not None, "a step is planned first"
        first = rows.singles
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if first:
            if not self._planned:  # in the first layer, since planning needs the number of heads
                self._plan_decode(rows, q)
            in_pages = (-1, shape.page_size, shape.kv_heads, shape.head_dim)
            self._wrapper.run(
                q[:first],
                (cache.keys.view(in_pages), cache.values.view(in_pages)),
                k_scale=cache.key_scale,
                v_scale=cache.value_scale,
                out=out[:first],
            )
        if len(rows.kv_lengths) > first and len(q) > first:
            launch_prefill(q, cache, rows, shape.scale, out)
        return out

    def _plan_decode(self, rows: PagedRows, q: torch.Tensor) -> None:
        if self._wrapper is None:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper

            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            # Its other kernel supports only a few ratios of query heads to key heads.
            self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
        shape, count = self._shape, rows.singles
        lengths = rows.kv_lengths[:count].cpu()
        pages = (lengths + shape.page_size - 1) // shape.page_size
        bounds = torch.zeros(count + 1, dtype=torch.int32)
        bounds[1:] = pages.cumsum(0)
        lines = rows.page_table.index_select(0, rows.lines[:count])  # [count, pages]
        place = torch.arange(lines.shape[1], device=q.device)
        known = place < pages.to(q.device).unsqueeze(1)
        self._wrapper.plan(
            bounds,
            lines[known],
            lengths - (pages - 1).clamp(min=0) * shape.page_size,
            q.shape[1],
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.kept,
            sm_scale=shape.scale,
        )
        self._planned = True
