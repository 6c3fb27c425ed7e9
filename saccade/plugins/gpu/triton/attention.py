"""Building blocks shared by attention kernels: online softmax over blocks of keys, and heads that
are split into two parts.

The inner step follows Milakov & Gimelshein 2018 and Dao 2023 (FlashAttention-2). `tl.dot` requires
powers of two, so a head of 72 values is split into 64 + 16, which costs 80 columns instead of 128.
Callers compute the addresses of keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1.0e30)
"""The score of a masked key. It is finite, so that rows with only masked keys do not become NaN."""
MIN_PART = 16
"""Minimum number of columns of a product on tensor cores."""
ALIGNED = 16
"""Triton compiles separate variants for strides that are multiples of this."""


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """A head of `dim` values as columns [0, d0) and [d0, d0 + d1), padded. d1 may be 0."""

    dim: int
    d0: int
    d1: int

    @classmethod
    def of(cls, dim: int, *strides: int) -> HeadTiling:
        """Return the cheapest tiling of at most two parts, each a power of two.

        strides: the row strides of the tensors that are loaded in parts, in values. If one of them
        is unaligned, the head is not split: keys are then copied without a pipeline, and ptxas 12.8
        computes a wrong shared memory address for the second part (observed on an H200; correct
        without ptxas's optimizations).
        """
        whole = max(MIN_PART, triton.next_power_of_2(dim))
        d0 = whole // 2
        if dim == whole or d0 < MIN_PART or dim < d0 or any(stride % ALIGNED for stride in strides):
            return cls(dim, whole, 0)
        d1 = max(MIN_PART, triton.next_power_of_2(dim - d0))
        return cls(dim, whole, 0) if d0 + d1 >= whole else cls(dim, d0, d1)


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's tile: the query rows and keys of a block, its warps and pipeline stages, and the
    maximum registers per thread, to fit more programs (`None`: unlimited).
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments for a launch."""
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | most


@triton.jit
def load_part(at, live, first: tl.constexpr, count: tl.constexpr, dim: tl.constexpr):
    """Load columns [first, first + count) of the rows at `at` [N] as [N, count]. Values are 0 where
    `live` [N] is false (None: all are live), and beyond `dim`.
    """
    c = first + tl.arange(0, count)
    places = at[:, None] + c[None, :]
    if first + count > dim:
        known = (c < dim)[None, :]
        if live is not None:
            known = known & live[:, None]
        values = tl.load(places, mask=known, other=0.0)
    elif live is not None:
        values = tl.load(places, mask=live[:, None], other=0.0)
    else:
        values = tl.load(places)
    return values


@triton.jit
def store_part(at, live, values, first: tl.constexpr, count: tl.constexpr, dim: tl.constexpr):
    """Store what `load_part` loads."""
    c = first + tl.arange(0, count)
    known = live[:, None]
    if first + count > dim:
        known = known & (c < dim)[None, :]
    tl.store(at[:, None] + c[None, :], values, mask=known)


@triton.jit
def attend_block(
    q0,
    q1,
    k_at,
    v_at,
    bias,
    seen,
    acc0,
    acc1,
    top,
    total,
    scale_log2,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
):
    """Process one more block of N keys. Returns the new (acc0, acc1, top, total).

    k_at, v_at [N]: addresses of the keys and their values. If v_at is None, the values are the keys
    and are loaded once. bias [N]: 0, or `NOTHING` for a masked key; at least one key must not be
    masked. seen [M, N]: the keys that each query attends to. Either may be None. Scores are in base
    2. acc1 is unused if d1 is 0.
    """
    k0 = load_part(k_at, None, 0, d0, dim).to(q0.dtype)
    scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if d1 > 0:
        k1 = load_part(k_at, None, d0, d1, dim).to(q0.dtype)
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
    if (seen is None) & (bias is None):  # scale and subtract in one operation per score
        new = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new[:, None])
    else:
        if seen is not None:
            scores = tl.where(seen, scores * scale_log2, NOTHING)
        else:
            scores = scores * scale_log2 + bias[None, :]
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    alpha = tl.exp2(top - new)
    total = total * alpha + tl.sum(p, 1)
    p = p.to(q0.dtype)
    v0 = k0 if v_at is None else load_part(v_at, None, 0, d0, dim).to(q0.dtype)
    acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
    if d1 > 0:
        v1 = k1 if v_at is None else load_part(v_at, None, d0, d1, dim).to(q0.dtype)
        acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")
    return acc0, acc1, new, total


@triton.jit
def beyond(cols, end):
    """Clamp positions [N] to the last one, `end` - 1. Returns them, and the bias that masks those
    that were beyond it.
    """
    return tl.minimum(cols, end - 1), tl.where(cols < end, 0.0, NOTHING)


@triton.jit
def begin(q_at, mine, dim: tl.constexpr, d0: tl.constexpr, d1: tl.constexpr):
    """The state before the first block: (q0, q1, acc0, acc1, top, total) of the queries at `q_at`
    [M], which are 0 where `mine` is false.
    """
    q0 = load_part(q_at, mine, 0, d0, dim)
    acc0 = tl.zeros([q_at.shape[0], d0], tl.float32)
    if d1 > 0:
        q1 = load_part(q_at, mine, d0, d1, dim)
        acc1 = tl.zeros([q_at.shape[0], d1], tl.float32)
    else:
        q1, acc1 = q0, acc0
    top = tl.full([q_at.shape[0]], NOTHING, tl.float32)
    return q0, q1, acc0, acc1, top, tl.zeros([q_at.shape[0]], tl.float32)


@triton.jit
def beside_keys(q, cache):
    """Convert queries [M, D] to the dtype in which they are multiplied by keys of `cache`. GPUs
    convert FP8 to float16 in one step, but to bfloat16 only by way of float32.
    """
    if (cache.dtype.element_ty.primitive_bitwidth == 8) & (q.dtype == tl.bfloat16):
        q = q.to(tl.float16)
    return q


@triton.jit
def finish(
    to,
    mine,
    acc0,
    acc1,
    total,
    scale,
    kind: tl.constexpr,
    dim: tl.constexpr,
    d0: tl.constexpr,
    d1: tl.constexpr,
):
    """Store the results after the last block, times `scale`, to `to` [M] as dtype `kind`. Queries
    that attend to no key get zeros.
    """
    share = (scale / tl.where(total > 0, total, 1.0))[:, None]
    store_part(to, mine, (acc0 * share).to(kind), 0, d0, dim)
    if d1 > 0:
        store_part(to, mine, (acc1 * share).to(kind), d0, d1, dim)
