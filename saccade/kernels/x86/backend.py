"""The language model's attention on x86 processors, in bfloat16: rows that decode by Numba's
kernel, which reads keys and values where they lie; prompts by PyTorch.
"""

from __future__ import annotations

import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape
from saccade.kernels.reference.sdpa import Attend, HostRows, SdpaAttention
from saccade.kernels.x86.paged import decode_paged, scratch_values


class X86Attention(SdpaAttention):
    """Neighbours of one token each share a call. Owns the memory that it works in."""

    def __init__(self, shape: PagedShape) -> None:
        super().__init__(shape)
        self._compiled = shape.kept == shape.dtype == torch.bfloat16
        self._scratch = torch.empty(0)

    def _shared(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        if not self._compiled:
            return super()._shared(host, first)
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
            wanted = scratch_values(*q.shape)
            if self._scratch.numel() < wanted:
                self._scratch = torch.empty(wanted)
            return decode_paged(q, kv, mine, self._shape.scale * kv.key_scale, self._scratch)

        return end, attend
