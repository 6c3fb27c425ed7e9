"""Causal attention of packed rows to a paged KV cache: its inputs, the protocol of attention
backends (by name in `language_attention.py`), and a reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from saccade.core.family import AttentionShape


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """How the programs of a GPU divide the keys of decoding rows among them (split-KV)."""

    items: torch.Tensor  # [capacity] int32: splits, in the order in which programs take them
    begins: torch.Tensor  # [singles] int32: the index in `items` of each row's first split
    counts: torch.Tensor  # [1 + Hkv] int32: number of splits, and how many are taken per key head
    piece: int  # minimum keys per split
    window: int = 0  # the sliding window of the layers; 0: unlimited


@dataclass(frozen=True, slots=True)
class PagedRows:
    """R rows with T packed tokens, and their KV pages.

    Row r has tokens `[q_starts[r], q_starts[r + 1])`. They are the last of the first
    `kv_lengths[r]` tokens of its sequence. These are all cached, in the KV pages
    `page_table[lines[r]]`, in order.
    """

    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    lines: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [lines, pages] int32
    page_size: int
    # Number of decoding rows, which have a single token each and come first. Other rows may have
    # any number of tokens. Launches depend only on `singles`, T and R, not on values in device
    # memory, so that a graph can be captured.
    singles: int
    # on a GPU, for the decoding rows; computed once per step for each window size
    work: DecodeWork | None = None
    # In layers with `AttentionShape.both_ways`, for steps with images: how many keys of its
    # sequence each token attends to, which never decreases within a row. `None`: the keys up to
    # its own.
    sees: torch.Tensor | None = None  # [T] int64


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of one layer, [KV slots, KV heads, head dim] each.

    A KV slot is page * page_size + offset in the page. Values of an 8-bit cache are multiplied by
    the scales. For latents, keys and values are the same tensor.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
    shape: AttentionShape = field(kw_only=True)


def plain_shape(keys: torch.Tensor, values: torch.Tensor) -> AttentionShape:
    """Return the `AttentionShape` of causal attention over these cache tensors."""
    heads, dim = keys.shape[1:]
    return AttentionShape(heads, dim, latent=values is keys)


def plain_cache(
    keys: torch.Tensor, values: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0
) -> PagedCache:
    """Return the cache of a layer with causal attention."""
    return PagedCache(keys, values, key_scale, value_scale, shape=plain_shape(keys, values))


@dataclass(frozen=True, slots=True)
class PagedShape:
    """The sizes and dtypes for which an attention backend is created."""

    kv_heads: int
    head_dim: int
    page_size: int
    kept: torch.dtype  # dtype of the cache
    dtype: torch.dtype  # dtype of the queries

    @property
    def halves(self) -> bool:
        """True if queries and cache are in bfloat16, as x86 kernels require."""
        return self.kept == self.dtype == torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class AttentionBackend(Protocol):
    """Computes causal attention (lower right) of packed rows, each to its own sequence.

    The keys and values of these rows are already in the cache. Other features of `PagedCache.shape`
    are only required of backends that declare them (`LanguageAttention.knows`).
    """

    def plan(self, rows: PagedRows) -> None:
        """Prepare for a step's rows. Call this once, before the first layer.

        Captured graphs include this call.
        """
        ...

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """Return the attention [T, Hq, D] of one layer's queries [T, Hq, D]."""
        ...


class ReferenceAttention:
    """Computes attention row by row in float32. Tests compare other backends with it.

    It only runs on a CPU, because the host reads the rows' offsets.
    """

    def __init__(self, shape: PagedShape) -> None:
        self._scale = shape.scale
        self._rows: PagedRows | None = None

    def plan(self, rows: PagedRows) -> None:
        self._rows = rows

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        assert self._rows is not None, "a step is planned first"
        return paged_attention_reference(q, cache, self._rows, self._scale)


def paged_attention_reference(
    q: torch.Tensor, cache: PagedCache, rows: PagedRows, scale: float
) -> torch.Tensor:
    """Return the causal attention of q [T, Hq, D], row by row, in float32 (float64 if `q` is).

    The window of a layer limits the keys of a token. `rows.sees` lets a token attend to keys after
    its own.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    group = q.shape[1] // cache.keys.shape[1]
    starts = rows.q_starts.tolist()
    for line, start, end, length in zip(
        rows.lines.tolist(), starts, starts[1:], rows.kv_lengths.tolist()
    ):
        if start == end:
            continue
        at = torch.arange(length, device=q.device)
        pages = rows.page_table[line].index_select(0, at // rows.page_size).long()
        slots = pages * rows.page_size + at % rows.page_size
        k = (cache.keys[slots].to(wide) * cache.key_scale).repeat_interleave(group, 1)
        v = (cache.values[slots].to(wide) * cache.value_scale).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(wide), k) * scale
        place = torch.arange(length - (end - start), length, device=q.device)
        own = rows.sees if cache.shape.both_ways else None
        sees = place + 1 if own is None else own[start:end]
        hidden = at >= sees[:, None]
        if cache.shape.window is not None:
            hidden |= at <= place[:, None] - cache.shape.window
        scores = scores.masked_fill(hidden, -torch.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
