"""The language model's attention over the paged KV cache, one class per kind of device; both
implement `nn.protocol.Attention`.

Owns how keys and values are found by the page table. Knows nothing of sequences beyond a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from saccade.kernels import device
from saccade.kernels.attention import causal_attention, decode_attention
from saccade.kernels.layer import QKNorm, turn_and_cache
from saccade.kernels.paged import PagedCache, PagedRows, paged_attention, plan_decode
from saccade.kernels.rotary import Rotation
from saccade.nn.protocol import Attention, Batch
from saccade.runtime.states import StateLayers, StateRecurrence

KVCache = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""By layer, of those that have them, (keys, values), each [kv slots, kv heads, head dim].

A kv slot is page * page_size + offset in page.
"""


KVScales = Sequence[tuple[float, float]]
"""Per layer, what keys and values were divided by when they were put into a cache of 8 bits."""

Read = Callable[[torch.Tensor], torch.Tensor]
"""A sequence's keys or values, of a layer's whole cache."""
Attend = Callable[[torch.Tensor, PagedCache], torch.Tensor]
"""Attention of some of a batch's queries, given a layer's whole cache."""

ABREAST_VALUES = 1 << 15
"""Keys of a sequence that decodes, in values: up to so many it costs less to copy them beside those
of others than to have a call of its own (measured: LOG.md).
"""
FEWEST_ABREAST = 4
"""Sequences that a shared call is worth while for."""


NO_STATES: StateLayers = {}


def attention_for(
    kv: KVCache,
    page_size: int,
    states: StateLayers = NO_STATES,
    *,
    dtype: torch.dtype | None = None,
    scales: KVScales = (),
    graphs: bool = False,
) -> Attention:
    """The one for the device that the cache lies on; with `graphs`, one that reads lengths and
    pages from there alone.

    states: of the layers that keep them in place of keys and values. dtype: of queries, where the
    cache has another. scales: none are ones.
    """
    each = scales or [(1.0, 1.0)] * len(kv)
    caches = {
        layer: PagedCache(*kept, *scale)
        for (layer, kept), scale in zip(kv.items(), each, strict=True)
    }
    any_keys = next(iter(caches.values())).keys
    if graphs or device.runs_triton(any_keys):
        return PagedAttention(caches, page_size, states)
    return SequenceAttention(caches, page_size, dtype or any_keys.dtype, states)


class DecodeAttention:
    """Rows of one token each, by Numba's kernel. Owns the memory that it works in."""

    def __init__(self, page_size: int, scale: float) -> None:
        self._page_size = page_size
        self._scale = scale
        self._scratch = torch.empty(0)

    def rows(self, batch: Batch, mine: slice) -> Attend:
        """For rows `mine` of the batch."""
        # Imported where it runs: elsewhere Numba need not be installed.
        from saccade.kernels.x86.paged import decode_paged, scratch_values

        rows = PagedRows(
            batch.q_starts[mine.start : mine.stop + 1],
            batch.kv_lengths[mine],
            batch.slots[mine],
            batch.page_table,
            self._page_size,
            mine.stop - mine.start,
        )

        def attend(q: torch.Tensor, kv: PagedCache) -> torch.Tensor:
            wanted = scratch_values(*q.shape)
            if self._scratch.numel() < wanted:
                self._scratch = torch.empty(wanted)
            return decode_paged(q, kv, rows, self._scale * kv.key_scale, self._scratch)

        return attend


class SequenceAttention:
    """For CPUs. Where Numba's kernels run, neighbours that decode share a call that reads keys and
    values where they lie. Else those that decode after few tokens share one, and any other sequence
    has one of its own: there, consecutive pages are read in place, others are gathered.
    """

    def __init__(
        self,
        caches: Mapping[int, PagedCache],
        page_size: int,
        dtype: torch.dtype,
        states: StateLayers = NO_STATES,
    ) -> None:
        """dtype: of queries."""
        self.recurrence = StateRecurrence(states)
        self._caches = caches
        self._page_size = page_size
        keys = next(iter(caches.values())).keys  # of whichever layer: all are alike
        self._dtype = dtype
        _, self._kv_heads, self._dim = keys.shape
        self._scale = self._dim**-0.5
        compiled = device.runs_jit(keys) and keys.dtype == dtype
        self._decoding = DecodeAttention(page_size, self._scale) if compiled else None
        slot, head, value = keys.stride()
        self._strides = (0, head, slot, value)
        self._out_slots = torch.empty(0, dtype=torch.int64)
        self._rows: list[tuple[slice, Attend]] = []
        # A window of it that begins `length` before the middle masks all but `length` keys.
        self._abreast_keys = most = max(1, ABREAST_VALUES // (self._kv_heads * self._dim))
        self._strip = torch.zeros(2 * most, dtype=dtype)
        self._strip[most:] = -torch.inf
        self._places = np.arange(most)
        self._lies = np.divmod(self._places, page_size)  # page of a sequence, and offset in it

    def plan(self, batch: Batch) -> None:
        self.recurrence.plan(batch)
        self._out_slots = batch.out_slots
        table = batch.page_table.numpy()
        starts, lines = batch.q_starts.tolist(), batch.slots.tolist()
        lengths = batch.kv_lengths.tolist()
        self._rows, row = [], 0
        while row < len(lines):
            end = self._abreast(starts, lengths, row)
            if self._decoding is not None and end > row:
                attend = self._decoding.rows(batch, slice(row, end))
            elif end - row >= FEWEST_ABREAST:
                attend = self._together(table, lines[row:end], lengths[row:end])
            else:
                end, attend = row + 1, self._alone(table[lines[row]], lengths[row])
            self._rows.append((slice(starts[row], starts[end]), attend))
            row = end

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        cache = self._caches[layer]
        q = turn_and_cache(qkv, self._kv_heads, rotation, qk_norm, cache, self._out_slots)
        if len(self._rows) == 1:
            attended = self._rows[0][1](q, cache)
        else:
            attended = torch.cat([attend(q[rows], cache) for rows, attend in self._rows])
        # Each is a mean of values: their scale may come last.
        return attended if cache.value_scale == 1.0 else attended * cache.value_scale

    def _abreast(self, starts: Sequence[int], lengths: Sequence[int], row: int) -> int:
        """Where the rows from `row` on end that decode, after few tokens or by a kernel for any
        number of them.
        """
        while (
            row < len(lengths)
            and starts[row + 1] - starts[row] == 1
            and (self._decoding is not None or lengths[row] <= self._abreast_keys)
        ):
            row += 1
        return row

    def _together(
        self, table: npt.NDArray[np.int32], lines: Sequence[int], lengths: Sequence[int]
    ) -> Attend:
        """For rows of one token each, whose sequences have these lines of the page table."""
        counts, longest = np.array(lengths), max(lengths)
        page, offset = self._lies
        pages = table[np.array(lines)[:, None], page[:longest]]
        index = pages * np.int64(self._page_size)
        index += offset[:longest]  # [R, longest]
        # What is masked is read all the same, and the rest of a page may hold anything.
        index = np.where(self._places[:longest] < counts[:, None], index, index[:, :1])
        windows = torch.from_numpy(len(self._places) - counts)
        mask = self._strip.unfold(0, longest, 1).index_select(0, windows)
        shape = (len(lengths), longest, self._kv_heads, self._dim)
        read = self._reads(partial(self._gather, torch.from_numpy(index.reshape(-1)), shape))
        return lambda q, kv: decode_attention(
            q, read(kv.keys), read(kv.values), mask, self._scale * kv.key_scale
        )

    def _alone(self, line: npt.NDArray[np.int32], length: int) -> Attend:
        """For the last tokens of one sequence, whose pages begin `line`."""
        size = self._page_size
        pages = line[: -(-length // size)]
        first = int(pages[0])
        if pages.tolist() == list(range(first, first + len(pages))):
            shape = (1, self._kv_heads, length, self._dim)
            read = self._reads(partial(self._slice, shape, first * size))
        else:
            read = self._reads(partial(self._gather_pages, torch.from_numpy(pages), length))
        return lambda q, kv: causal_attention(
            q, read(kv.keys), read(kv.values), self._scale * kv.key_scale
        )

    def _reads(self, read: Read) -> Read:
        """`read`, as queries need it."""
        if next(iter(self._caches.values())).keys.dtype == self._dtype:
            return read
        return lambda kept: read(kept).to(self._dtype)

    def _slice(
        self, shape: tuple[int, int, int, int], first: int, cache: torch.Tensor
    ) -> torch.Tensor:
        """Keys or values [1, Hkv, K, D] of one sequence, from kv slot `first` on."""
        # One call where slicing and turning would be four: this runs twice per layer, sequence and
        # token.
        return cache.as_strided(shape, self._strides, first * self._strides[2])

    def _gather_pages(self, pages: torch.Tensor, length: int, cache: torch.Tensor) -> torch.Tensor:
        """The same, page by page: at worst half the time of token by token."""
        paged = cache.view(-1, self._page_size, self._kv_heads, self._dim).index_select(0, pages)
        return paged.view(-1, self._kv_heads, self._dim)[:length].transpose(0, 1).unsqueeze(0)

    def _gather(
        self, index: torch.Tensor, shape: tuple[int, int, int, int], cache: torch.Tensor
    ) -> torch.Tensor:
        """Keys or values [R, Hkv, K, D] in the kv slots `index` [R * K]; shape: [R, K, Hkv, D]."""
        return cache.index_select(0, index).view(shape).transpose(1, 2)


class PagedAttention:
    """For GPUs: keys and values are read where they lie, in as many launches whatever the number of
    sequences. The host waits for nothing.

    NOT YET RUN on a GPU.
    """

    def __init__(
        self, caches: Mapping[int, PagedCache], page_size: int, states: StateLayers = NO_STATES
    ) -> None:
        self.recurrence = StateRecurrence(states)
        self._caches = caches
        self._page_size = page_size
        _, self._kv_heads, dim = next(iter(caches.values())).keys.shape
        self._scale = dim**-0.5
        self._rows: PagedRows | None = None
        self._out_slots = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        self.recurrence.plan(batch)
        self._out_slots = batch.out_slots
        rows = PagedRows(
            batch.q_starts,
            batch.kv_lengths,
            batch.slots,
            batch.page_table,
            self._page_size,
            batch.singles,
        )
        self._rows = plan_decode(rows, self._kv_heads)

    def __call__(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QKNorm | None, layer: int
    ) -> torch.Tensor:
        assert self._rows is not None, "a batch is planned first"
        cache, kv_heads = self._caches[layer], self._kv_heads
        q = turn_and_cache(qkv, kv_heads, rotation, qk_norm, cache, self._out_slots)
        return paged_attention(q, cache, self._rows, self._scale)
