"""The language model's attention on CPUs, computed with PyTorch's scaled dot product attention.
There is one call per sequence, except that short decoding sequences share a call.

Consecutive KV pages are read in place. Others are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.kernels.reference.attention import (
    block_attention,
    blocks_of,
    causal_attention,
    decode_attention,
)
from saccade.kernels.reference.long_attention import Softmax, softmax
from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape

Read = Callable[[torch.Tensor], torch.Tensor]
"""Reads a sequence's keys or values from a layer's cache."""
Attend = Callable[[torch.Tensor, PagedCache], torch.Tensor]
"""Computes the attention of some of a step's queries, with a layer's cache."""

ABREAST_VALUES = 1 << 14
"""Maximum size of a decoding sequence's keys, in values, for a shared call. Below it, copying them
into a batch takes less time than a separate call (measured in decision 002).
"""
FEWEST_ABREAST = 4
"""Minimum number of sequences for a shared call."""


class HostRows(NamedTuple):
    """A step's rows as the host reads them: their offsets, page table rows and numbers of keys."""

    rows: PagedRows
    starts: list[int]
    lines: list[int]
    lengths: list[int]

    def until(self, end: int) -> HostRows:
        """Return the rows before row `end`."""
        kept = self.starts[: end + 1], self.lines[:end], self.lengths[:end]
        return HostRows(self.rows, *kept)

    def reach(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position of each token of a row, and the number of keys that it attends to."""
        start, end, length = self.starts[row], self.starts[row + 1], self.lengths[row]
        place = torch.arange(length - (end - start), length)
        return place, place + 1 if self.rows.sees is None else self.rows.sees[start:end]

    def causally(self) -> HostRows:
        """Return the same rows for a layer in which image tokens attend causally, too."""
        if self.rows.sees is None:
            return self
        return self._replace(rows=replace(self.rows, sees=None))

    def all_causal(self, window: int | None) -> bool:
        """Return True if each token attends to all keys up to its own, with this window."""
        return self.rows.sees is None and (window is None or max(self.lengths) <= window)

    def causal(self, row: int, window: int | None) -> bool:
        """Return True if a row's tokens attend to all keys up to their own, with this window."""
        place, sees = self.reach(row)
        near = not len(place) or window is None or self.lengths[row] <= window
        return near and torch.equal(sees, place + 1)

    def decoding(self, first: int, most: int | None = None) -> int:
        """Return the end of the consecutive decoding rows that start at `first`.

        most: the maximum number of keys of a row, or None for any number.
        """
        at, starts, lengths = first, self.starts, self.lengths
        while (
            at < len(lengths)
            and starts[at + 1] - starts[at] == 1
            and (most is None or lengths[at] <= most)
        ):
            at += 1
        return at


class SdpaAttention:
    """Computes attention with PyTorch on a CPU. Implements `reference.paged.AttentionBackend`."""

    def __init__(self, shape: PagedShape, softmax: Softmax = softmax) -> None:
        self._shape = shape
        self._softmax = softmax
        self._strides = (0, shape.head_dim, shape.kv_heads * shape.head_dim, 1)
        self._calls: list[tuple[slice, Attend]] = []
        self._host: HostRows | None = None
        # the calls by window, and by whether attention is causal within images
        self._within: dict[tuple[int | None, bool], list[tuple[slice, Attend]]] = {}
        # The slice of the strip that starts `length` before its middle masks all but `length` keys.
        self._abreast_keys = most = max(1, ABREAST_VALUES // (shape.kv_heads * shape.head_dim))
        self._strip = torch.zeros(2 * most, dtype=shape.dtype)
        self._strip[most:] = -torch.inf
        self._places = np.arange(most)
        self._page_offsets = np.divmod(
            self._places, shape.page_size
        )  # (page of a sequence, offset)

    def plan(self, rows: PagedRows) -> None:
        host = HostRows(rows, rows.q_starts.tolist(), rows.lines.tolist(), rows.kv_lengths.tolist())
        self._host, self._within = host, {}
        self._calls = self._cut(host, 0)

    def _cut(self, host: HostRows, row: int) -> list[tuple[slice, Attend]]:
        calls = []
        while row < len(host.lines):
            end, attend = self._shared(host, row) or (row + 1, self._single_call(host, row))
            calls.append((slice(host.starts[row], host.starts[end]), attend))
            row = end
        return calls

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        host, window = self._host, cache.shape.window
        assert host is not None, "a step is planned first"
        if not cache.shape.both_ways:
            host = host.causally()
        calls = self._calls if host.all_causal(window) else self._ranged(host, window)
        if len(calls) == 1:
            attended = calls[0][1](q, cache)
        else:
            attended = torch.cat([attend(q[rows], cache) for rows, attend in calls])
        # Attention is a weighted mean of values, so their scale can be applied at the end.
        return attended if cache.value_scale == 1.0 else attended * cache.value_scale

    def _shared(self, host: HostRows, first: int) -> tuple[int, Attend] | None:
        """Return the end of the rows from `first` that share a call, and the call.

        Returns None if the first row should have a separate call.
        """
        end = host.decoding(first, self._abreast_keys)
        if end - first < FEWEST_ABREAST:
            return None
        table = host.rows.page_table.numpy()
        return end, self._batched_call(table, host.lines[first:end], host.lengths[first:end])

    def _batched_call(
        self, table: npt.NDArray[np.int32], lines: list[int], lengths: list[int]
    ) -> Attend:
        counts, longest = np.array(lengths), max(lengths)
        page, offset = self._page_offsets
        pages = table[np.array(lines)[:, None], page[:longest]]
        index = pages * np.int64(self._shape.page_size)
        index += offset[:longest]  # [R, longest]
        # Masked positions are read, too. Read the first key there, as unused slots may hold NaN.
        index = np.where(self._places[:longest] < counts[:, None], index, index[:, :1])
        windows = torch.from_numpy(len(self._places) - counts)
        mask = self._strip.unfold(0, longest, 1).index_select(0, windows)
        shape = (len(lengths), longest, self._shape.kv_heads, self._shape.head_dim)
        read = self._reads(partial(_gather, torch.from_numpy(index.reshape(-1)), shape))
        scale = self._shape.scale
        return lambda q, kv: decode_attention(
            q, read(kv.keys), read(kv.values), mask, scale * kv.key_scale
        )

    def _single_call(self, host: HostRows, row: int) -> Attend:
        length = host.lengths[row]
        if not length:  # padding, which attends to no keys
            return lambda q, _: torch.zeros_like(q)
        line = host.rows.page_table.numpy()[host.lines[row]]
        read, scale = self._reader(line, length), self._shape.scale
        return lambda q, kv: causal_attention(
            q, read(kv.keys), read(kv.values), scale * kv.key_scale, self._softmax
        )

    def _reader(self, line: npt.NDArray[np.int32], length: int) -> Read:
        """Return a function that reads the first `length` tokens of the KV pages in `line`."""
        size = self._shape.page_size
        pages = line[: -(-length // size)]
        first = int(pages[0])
        if pages.tolist() == list(range(first, first + len(pages))):
            shape = (1, self._shape.kv_heads, length, self._shape.head_dim)
            return self._reads(partial(self._slice, shape, first * size))
        return self._reads(partial(self._gather_pages, torch.from_numpy(pages), length))

    def _ranged(self, host: HostRows, window: int | None) -> list[tuple[slice, Attend]]:
        """Return the calls for layers with this window. They are cached for the step.

        Causal rows are computed as in a step without other rows, with bit-identical results.
        """
        kind = window, host.rows.sees is None
        if (found := self._within.get(kind)) is not None:
            return found
        found, row = [], 0
        while row < len(host.lines):
            end = row
            while end < len(host.lines) and host.causal(end, window):
                end += 1
            if end > row:
                found += self._cut(host.until(end), row)
                row = end
                continue
            rows = slice(host.starts[row], host.starts[row + 1])
            found.append((rows, self._within_reach(host, row, window)))
            row += 1
        self._within[kind] = found
        return found

    def _within_reach(self, host: HostRows, row: int, window: int | None) -> Attend:
        place, sees = host.reach(row)
        first = place - place if window is None else (place + 1 - window).clamp_(min=0)
        size, line = self._shape.page_size, host.rows.page_table.numpy()[host.lines[row]]
        skipped = int(first[0]) // size  # pages to which no token attends
        unseen = skipped * size
        read = self._reader(line[skipped:], host.lengths[row] - unseen)
        blocks, scale = blocks_of(first - unseen, sees - unseen), self._shape.scale
        return lambda q, kv: block_attention(
            q, read(kv.keys), read(kv.values), blocks, scale * kv.key_scale
        )

    def _reads(self, read: Read) -> Read:
        if self._shape.kept == self._shape.dtype:
            return read
        return lambda kept: read(kept).to(self._shape.dtype)

    def _slice(
        self, shape: tuple[int, int, int, int], first: int, cache: torch.Tensor
    ) -> torch.Tensor:
        """Return the keys or values of one sequence, [1, Hkv, K, D], starting at KV slot
        `first`.
        """
        # One call replaces four for slicing and transposing, because this runs twice per layer,
        # sequence and token.
        start = cache.storage_offset() + first * self._strides[2]
        return cache.as_strided(shape, self._strides, start)

    def _gather_pages(self, pages: torch.Tensor, length: int, cache: torch.Tensor) -> torch.Tensor:
        size, heads, dim = self._shape.page_size, self._shape.kv_heads, self._shape.head_dim
        paged = cache.view(-1, size, heads, dim).index_select(0, pages)
        return paged.view(-1, heads, dim)[:length].transpose(0, 1).unsqueeze(0)


def _gather(
    index: torch.Tensor, shape: tuple[int, int, int, int], cache: torch.Tensor
) -> torch.Tensor:
    return cache.index_select(0, index).view(shape).transpose(1, 2)
