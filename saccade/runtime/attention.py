"""The language model's attention over the paged KV cache, one class per kind of device; both
implement `nn.protocol.Attention`.

Owns how keys and values are found by the page table. Knows nothing of sequences beyond a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from saccade.kernels.attention import causal_attention
from saccade.kernels.device import runs_triton
from saccade.kernels.layer import QKNorm, turn_and_cache
from saccade.kernels.paged import PagedCache, PagedRows, paged_attention
from saccade.kernels.rotary import Rotation
from saccade.nn.protocol import Attention, Batch

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (keys, values), each [kv slots, kv heads, head dim].

A kv slot is page * page_size + offset in page.
"""


Reads = Callable[[torch.Tensor], torch.Tensor]
"""From a layer's keys, or values, to those of one sequence [1, kv heads, tokens, head dim]."""


def attention_for(kv: KVCache, page_size: int) -> Attention:
    """The one for the device that the cache lies on."""
    kind = PagedAttention if runs_triton(kv[0][0]) else SequenceAttention
    return kind(kv, page_size)


class SequenceAttention:
    """For CPUs: one call per sequence. Consecutive pages are read in place, others are gathered."""

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self._kv = kv
        self._page_size = page_size
        _, self._kv_heads, self._dim = kv[0][0].shape
        self._scale = self._dim**-0.5
        slot, head, value = kv[0][0].stride()
        self._strides = (0, head, slot, value)
        self._out_slots = torch.empty(0, dtype=torch.int64)
        self._rows: list[tuple[slice, Reads]] = []  # query rows, and how to read keys and values

    def plan(self, batch: Batch) -> None:
        self._out_slots = batch.out_slots
        table, size = batch.page_table.numpy(), self._page_size
        starts, self._rows = batch.q_starts.tolist(), []
        for line, start, end, length in zip(
            batch.slots.tolist(), starts, starts[1:], batch.kv_lengths.tolist()
        ):
            pages = table[line, : -(-length // size)]
            first = int(pages[0])
            follows = pages.tolist() == list(range(first, first + len(pages)))
            read = (
                partial(self._slice, (1, self._kv_heads, length, self._dim), first * size)
                if follows
                else partial(self._gather, torch.from_numpy(pages), length)
            )
            self._rows.append((slice(start, end), read))

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        k_cache, v_cache = self._kv[layer]
        cache = k_cache, v_cache
        q = turn_and_cache(qkv, self._kv_heads, rotation, qk_norm, cache, self._out_slots)
        if len(self._rows) == 1:
            read = self._rows[0][1]
            return causal_attention(q, read(k_cache), read(v_cache), self._scale)
        return torch.cat(
            [
                causal_attention(q[rows], read(k_cache), read(v_cache), self._scale)
                for rows, read in self._rows
            ]
        )

    def _slice(
        self, shape: tuple[int, int, int, int], first: int, cache: torch.Tensor
    ) -> torch.Tensor:
        """Keys or values [1, Hkv, K, D] of one sequence, from kv slot `first` on."""
        # One call where slicing and turning would be four: this runs twice per layer, sequence and
        # token.
        return cache.as_strided(shape, self._strides, first * self._strides[2])

    def _gather(self, pages: torch.Tensor, length: int, cache: torch.Tensor) -> torch.Tensor:
        """The same, page by page: at worst half the time of token by token."""
        paged = cache.view(-1, self._page_size, self._kv_heads, self._dim).index_select(0, pages)
        return paged.view(-1, self._kv_heads, self._dim)[:length].transpose(0, 1).unsqueeze(0)


class PagedAttention:
    """For GPUs: keys and values are read where they lie, in as many launches whatever the number of
    sequences. The host waits for nothing.

    NOT YET RUN on a GPU.
    """

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self._caches = [PagedCache(keys, values) for keys, values in kv]
        self._page_size = page_size
        _, self._kv_heads, dim = kv[0][0].shape
        self._scale = dim**-0.5
        self._rows: PagedRows | None = None
        self._out_slots = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        self._out_slots = batch.out_slots
        self._rows = PagedRows(
            batch.q_starts,
            batch.kv_lengths,
            batch.slots,
            batch.page_table,
            self._page_size,
            batch.singles,
        )

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        assert self._rows is not None, "a batch is planned first"
        cache, kv_heads = self._caches[layer], self._kv_heads
        written = cache.keys, cache.values
        q = turn_and_cache(qkv, kv_heads, rotation, qk_norm, written, self._out_slots)
        return paged_attention(q, cache, self._rows, self._scale)
