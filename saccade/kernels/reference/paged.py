"""Packed rows attend causally to keys and values on pages.

Owns the way to a row's pages, the meaning in plain PyTorch, and the contract with those that
replace it (by name in `language_attention.py`). Unaware of sequences, worker slots and plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from saccade.core.family import AttentionShape


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """How keys are divided among a GPU's programs, for a step's rows with one token."""

    items: torch.Tensor  # [room] int32; pieces of rows, in the order of taking
    begins: torch.Tensor  # [singles] int32; where each row's pieces begin in `items`
    # how many pieces there are, and how many are taken by key head
    counts: torch.Tensor  # [1 + Hkv] int32
    piece: int  # keys in one, at least
    window: int = 0  # that in its layers; 0: unlimited


@dataclass(frozen=True, slots=True)
class PagedRows:
    """R rows with T packed tokens, and the places of their keys and values.

    Row r has the tokens `[q_starts[r], q_starts[r + 1])`, the last among its sequence's first
    `kv_lengths[r]` tokens, on the pages `page_table[lines[r]]`, in order.
    """

    q_starts: torch.Tensor  # [R + 1] int32
    kv_lengths: torch.Tensor  # [R] int32
    lines: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [lines, pages] int32
    page_size: int
    # this many rows, the first ones, have one token each (they decode); the rest may have any
    # number. Launches depend only on `singles`, T and R, rather than values on the device, so that
    # a graph can be captured.
    singles: int
    # on a GPU, for the decoding rows, made once a step for each window size
    work: DecodeWork | None = None
    # how many keys in its sequence each token sees in layers with `AttentionShape.both_ways`, in a
    # step with images whose tokens see each other's successors there; within a row at least as many
    # as the token before. `None`: those up to its own.
    sees: torch.Tensor | None = None  # [T] int64


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One layer's keys and values, [kv slots, kv heads, head dim] each.

    A kv slot is page * page_size + offset in page. The scales turn kept numbers into their values
    (8-bit caches). Latents are both, one tensor. `PagedRows.sees` is the layer's if its shape has
    `both_ways`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
    shape: AttentionShape = field(kw_only=True)


def plain_shape(keys: torch.Tensor, values: torch.Tensor) -> AttentionShape:
    """Return the shape for causal attention over a cache with these tensors."""
    heads, dim = keys.shape[1:]
    return AttentionShape(heads, dim, latent=values is keys)


def plain_cache(
    keys: torch.Tensor, values: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0
) -> PagedCache:
    """Return the cache for a layer whose attention is causal."""
    return PagedCache(keys, values, key_scale, value_scale, shape=plain_shape(keys, values))


@dataclass(frozen=True, slots=True)
class PagedShape:
    """What an attention backend must satisfy."""

    kv_heads: int
    head_dim: int
    page_size: int
    kept: torch.dtype  # the cache's dtype;
    dtype: torch.dtype  # the queries'

    @property
    def halves(self) -> bool:
        """Return True if queries and cache are in bfloat16, which x86's kernels take."""
        return self.kept == self.dtype == torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class AttentionBackend(Protocol):
    """Causal (lower right) attention for packed rows, each to its own sequence.

    A row's own keys and values are in the cache already, and included. What else `PagedCache.shape`
    asks is for attention that knows it (`LanguageAttention.knows`) alone.
    """

    def plan(self, rows: PagedRows) -> None:
        """Prepare for a step's rows. Call once, before its first layer.

        A captured graph includes the call.
        """
        ...

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """Return the attention [T, Hq, D] for one layer's queries [T, Hq, D], with the layer's
        cache.
        """
        ...


class ReferenceAttention:
    """Row by row in float32: the reference when other backends are tested.

    Runs on a CPU alone, because the host reads where rows begin.
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
    """Attend causally with q [T, Hq, D], row by row, in float32 (float64 where `q` is).

    A token sees the layer's window, and beyond its own place as far as `rows.sees`.
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
