"""The language model's attention over the paged KV cache, one class per kind of device; both
implement `nn.protocol.Attention`.

Owns how keys and values are found by the page table. Knows nothing of sequences beyond a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.kernels.attention import Runs, causal_attention, packed_causal_attention, write_kv
from saccade.nn.protocol import Attention, Batch

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (keys, values), each [kv slots, kv heads, head dim].

A kv slot is page * page_size + offset in page.
"""


def attention_for(kv: KVCache, page_size: int) -> Attention:
    """The one for the device that the cache lies on."""
    kind = PackedAttention if kv[0][0].is_cuda else SequenceAttention
    return kind(kv, page_size)


class SequenceAttention:
    """For CPUs: one call per sequence. Consecutive pages are read in place, others are gathered."""

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self._kv = kv
        self._page_size = page_size
        self._scale = kv[0][0].shape[-1] ** -0.5
        self._out_slots = torch.empty(0, dtype=torch.int64)
        # Of each row: query rows, tokens in the cache, and the first kv slot or else the pages.
        self._rows: list[tuple[slice, int, int, torch.Tensor | None]] = []

    def plan(self, batch: Batch) -> None:
        self._out_slots = batch.out_slots
        lengths = batch.kv_lengths.numpy()
        counts = -(-lengths // self._page_size)
        table = batch.page_table.numpy()[batch.slots.numpy(), : counts.max()]  # [R, pages]
        follows = np.diff(table, axis=1) == 1
        follows |= np.arange(1, table.shape[1]) >= counts[:, None]
        firsts = (table[:, 0].astype(np.int64) * self._page_size).tolist()
        starts = batch.q_starts.tolist()
        self._rows = [
            (
                slice(start, end),
                length,
                first,
                None if consecutive else torch.from_numpy(pages[:count]),
            )
            for start, end, length, first, consecutive, pages, count in zip(
                starts,
                starts[1:],
                lengths.tolist(),
                firsts,
                follows.all(axis=1).tolist(),
                table,
                counts,
            )
        ]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        k_cache, v_cache = self._kv[layer]
        write_kv(k, v, k_cache, v_cache, self._out_slots)
        parts = []
        for rows, length, first, pages in self._rows:
            keys, values = (self._read(cache, length, first, pages) for cache in (k_cache, v_cache))
            queries = q if len(self._rows) == 1 else q[rows]
            parts.append(causal_attention(queries, keys, values, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(
        self, cache: torch.Tensor, length: int, first: int, pages: torch.Tensor | None
    ) -> torch.Tensor:
        """Keys or values [1, Hkv, K, D] of one sequence."""
        slot, head, value = cache.stride()
        if pages is not None:
            # Page by page: half the time of token by token.
            whole = cache.view(-1, self._page_size, *cache.shape[1:]).index_select(0, pages)
            return whole.view(-1, *cache.shape[1:])[:length].transpose(0, 1).unsqueeze(0)
        # One call where slicing and turning would be four: this runs twice per layer, sequence and
        # token.
        shape = (1, cache.shape[1], length, cache.shape[2])
        return cache.as_strided(
            shape, (0, head, slot, value), cache.storage_offset() + first * slot
        )


class PackedAttention:
    """For GPUs: the keys and values of all sequences are gathered, and attended to in one launch.

    The host waits for nothing. NOT YET RUN on a GPU.
    """

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self._kv = kv
        self._page_size = page_size
        self._scale = kv[0][0].shape[-1] ** -0.5
        none = torch.empty(0, dtype=torch.int64, device=kv[0][0].device)
        self._out_slots = none
        self._index: torch.Tensor | None = none  # [K] kv slots of all sequences; None: the batch's
        self._queries = self._keys = Runs(none, 0)

    def plan(self, batch: Batch) -> None:
        bounds = batch.bounds
        self._out_slots = batch.out_slots
        self._queries = Runs(batch.q_starts, bounds.row)
        if bounds.contexts == len(batch.tokens):
            # Nothing is cached: every sequence's keys and values are at hand.
            self._index, self._keys = None, self._queries
            return
        lengths = batch.kv_lengths
        ends = lengths.cumsum(0, dtype=torch.int32)
        self._keys = Runs(torch.nn.functional.pad(ends, (1, 0)), bounds.context)
        row = torch.repeat_interleave(lengths, output_size=bounds.contexts)  # [K]
        place = torch.arange(bounds.contexts, dtype=torch.int64, device=lengths.device)
        place = place - (ends - lengths).index_select(0, row)
        line = batch.slots.index_select(0, row) * batch.page_table.shape[1]
        page = batch.page_table.view(-1).index_select(0, line + place // self._page_size)
        self._index = page.long() * self._page_size + place % self._page_size

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        k_cache, v_cache = self._kv[layer]
        write_kv(k, v, k_cache, v_cache, self._out_slots)
        if self._index is not None:
            k, v = (cache.index_select(0, self._index) for cache in (k_cache, v_cache))
        return packed_causal_attention(q, k, v, self._queries, self._keys, self._scale)
