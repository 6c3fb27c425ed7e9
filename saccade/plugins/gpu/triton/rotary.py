"""Rotary position embedding (`rotary.py`) as one Triton kernel.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_VALUES = 2048
"""Maximum number of value pairs that a program rotates: tokens times heads times pairs per head."""


# Counts differ between batches. Specializing on them would compile kernels during requests.
@triton.jit(do_not_specialize=["tokens", "index_stride"])
def _rotate(
    x,
    cos_table,
    sin_table,
    index,
    axis,
    tokens,
    heads,
    token_stride,
    index_stride,
    head_stride: tl.constexpr,
    half: tl.constexpr,
    has_index: tl.constexpr,
    has_axis: tl.constexpr,
    halves: tl.constexpr,
    block_tokens: tl.constexpr,
    block_heads: tl.constexpr,
    block_pairs: tl.constexpr,
):
    """Program (i, j): block i of tokens, block j of heads.

    The head sizes are constants, so that the compiler can vectorize loads if they are multiples of
    4 or 8.
    """
    token = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    pair = tl.arange(0, block_pairs)
    known = (token < tokens)[:, None] & (pair < half)[None, :]
    if halves:
        step = half
        at = pair
    else:
        step = 1
        at = 2 * pair

    row = token[:, None]
    if has_index:
        if has_axis:
            source = tl.load(axis + pair, mask=pair < half, other=0)[None, :] * index_stride
            row = tl.load(index + source + token[:, None], mask=known, other=0)
        else:
            row = tl.load(index + token, mask=token < tokens, other=0)[:, None]
    # In the table of sines, the partner's column has the plus sign.
    place = row * (2 * half) + at[None, :]
    cos = tl.load(cos_table + place, mask=known, other=0.0)[:, None, :]
    sin = tl.load(sin_table + place + step, mask=known, other=0.0)[:, None, :]

    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    mine = known[:, None, :] & (head < heads)[None, :, None]
    low_at = x + (
        token[:, None, None] * token_stride + head[None, :, None] * head_stride + at[None, None, :]
    )
    high_at = low_at + step
    low = tl.load(low_at, mask=mine, other=0.0)
    high = tl.load(high_at, mask=mine, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    tl.store(low_at, (a * cos - b * sin).to(low.dtype), mask=mine)
    tl.store(high_at, (b * cos + a * sin).to(low.dtype), mask=mine)


def launch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor | None,
    axis: torch.Tensor | None,
    *,
    halves: bool,
) -> None:
    """Compute `rotary.rotate_` in one launch. The arguments are the fields of a `Rotation`."""
    assert x.stride(-1) == 1, "a head's values lie next to each other"
    assert cos.is_contiguous() and sin.is_contiguous()
    tokens, heads, _ = x.shape
    if tokens == 0:
        return
    half = cos.shape[1] // 2
    block_pairs = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, BLOCK_VALUES // block_pairs))
    block_tokens = max(1, BLOCK_VALUES // (block_pairs * block_heads))
    assert index is None or index.stride(-1) == 1
    _rotate[triton.cdiv(tokens, block_tokens), triton.cdiv(heads, block_heads)](
        x,
        cos,
        sin,
        index,
        axis,
        tokens,
        heads,
        x.stride(0),
        0 if index is None else index.stride(0),
        head_stride=x.stride(1),
        half=half,
        has_index=index is not None,
        has_axis=axis is not None,
        halves=halves,
        block_tokens=block_tokens,
        block_heads=block_heads,
        block_pairs=block_pairs,
    )
