"""The functions of `layer.py` as Triton kernels, one launch each.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.kernels.matrix import FP8
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.fp8 import LARGEST
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.paged import PagedCache
from saccade.plugins.gpu.triton.activation import GATES, activated

HEAD_VALUES = 1024
"""Maximum number of values in the heads that a program of `_rope_and_cache` processes."""
GATE_VALUES = 1024
WARP_VALUES = 512
"""Number of values of a row per warp in a normalization."""
MAX_WARPS = 16


@triton.jit
def _keep(x, to, mine, factor, largest: tl.constexpr):
    """Store x to the addresses `to` where `mine` is true.

    For an 8-bit cache, x is multiplied by `factor` and clamped to the format's maximum, `largest`.
    If `largest` is 0, x is stored as it is.
    """
    if largest > 0:
        x = tl.minimum(tl.maximum(x * factor, -largest), largest)
    tl.store(to, x.to(to.dtype.element_ty), mask=mine)


@triton.jit
def _rope_and_cache(
    qkv,
    q_out,
    k_cache,
    v_cache,
    qk_weight,
    cos_table,
    sin_table,
    out_slots,
    eps,
    key_factor,
    value_factor,
    token_stride,
    slot_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    turned: tl.constexpr,
    halves: tl.constexpr,
    has_norm: tl.constexpr,
    largest: tl.constexpr,
    block_heads: tl.constexpr,
    columns: tl.constexpr,
):
    """Program (token, block of heads): of queries, then keys, then values.

    Each value's rotation partner is loaded separately, and comes from the L1 cache. Exchanging
    values between threads would cost more.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    c = tl.arange(0, columns)
    known = (head < heads + 2 * kv_heads)[:, None] & (c < dim)[None, :]
    at = qkv + token * token_stride + head[:, None] * dim
    x = tl.load(at + c[None, :], mask=known, other=0.0).to(tl.float32)

    across = tl.where(c < turned // 2, c + turned // 2, c - turned // 2) if halves else c ^ 1
    partner = tl.where(c < turned, across, c)
    y = tl.load(at + partner[None, :], mask=known, other=0.0).to(tl.float32)
    is_value = head >= heads + kv_heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    if has_norm:
        weighed = known & (head < heads + kv_heads)[:, None]
        rows = qk_weight + head[:, None] * dim
        root = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
        weight = tl.load(rows + c[None, :], mask=weighed, other=0.0).to(tl.float32)
        other = tl.load(rows + partner[None, :], mask=weighed, other=0.0).to(tl.float32)
        kind = qkv.dtype.element_ty  # round before the rotation, as the reference does
        x = tl.where(is_value[:, None], x, (x * root * weight).to(kind).to(tl.float32))
        y = tl.where(is_value[:, None], y, (y * root * other).to(kind).to(tl.float32))
    cos = tl.load(cos_table + token * turned + c, mask=c < turned, other=1.0)[None, :]
    sin = tl.load(sin_table + token * turned + c, mask=c < turned, other=0.0)[None, :]
    x = tl.where(is_value[:, None], x, x * cos + y * sin)
    to = q_out + (token * heads + head)[:, None] * dim + c[None, :]
    tl.store(to, x.to(q_out.dtype.element_ty), mask=known & (head < heads)[:, None])
    slot = tl.load(out_slots + token) * slot_stride
    key = k_cache + slot + (head - heads)[:, None] * dim + c[None, :]
    _keep(x, key, known & is_key[:, None], key_factor, largest)
    value = v_cache + slot + (head - heads - kv_heads)[:, None] * dim + c[None, :]
    _keep(x, value, known & is_value[:, None], value_factor, largest)


def launch_rope_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
    *,
    halves: bool,
) -> torch.Tensor:
    """Compute `layer.rope_and_cache`. cos, sin: tables [T, R] of a rotation that is ready."""
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    keys, values = cache.keys, cache.values
    assert qkv.stride(2) == 1 and qkv.stride(1) == dim, "a token's heads lie back to back"
    assert keys.stride() == values.stride() and keys.stride(1) == dim
    assert cos.is_contiguous() and sin.is_contiguous()
    weight, eps = qk_norm or (None, 0.0)
    assert weight is None or weight.is_contiguous()
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    columns = triton.next_power_of_2(dim)
    block_heads = min(triton.next_power_of_2(all_heads), max(1, HEAD_VALUES // columns))
    _rope_and_cache[tokens, triton.cdiv(all_heads, block_heads)](
        qkv,
        q,
        keys,
        values,
        weight,
        cos,
        sin,
        out_slots,
        eps,
        1.0 / cache.key_scale,
        1.0 / cache.value_scale,
        qkv.stride(0),
        keys.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        turned=cos.shape[1],
        halves=halves,
        has_norm=weight is not None,
        largest=LARGEST if keys.dtype == FP8 else 0.0,
        block_heads=block_heads,
        columns=columns,
        num_warps=4,
    )
    return q


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    bias,
    total,
    normed,
    eps,
    size: tl.constexpr,
    columns: tl.constexpr,
    centred: tl.constexpr,
):
    """Program (row): total = x + delta, then RMSNorm of total, or LayerNorm if `centred`."""
    row = tl.program_id(0).to(tl.int64) * size
    c = tl.arange(0, columns)
    known = c < size
    kind = total.dtype.element_ty
    left = tl.load(x + row + c, mask=known, other=0.0).to(tl.float32)
    right = tl.load(delta + row + c, mask=known, other=0.0).to(tl.float32)
    added = (left + right).to(kind)  # rounded like the residual stream
    tl.store(total + row + c, added, mask=known)
    values = added.to(tl.float32)
    scale = tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    if centred:
        mean = tl.sum(values, 0) / size
        away = tl.where(known, values - mean, 0.0)
        out = away * tl.rsqrt(tl.sum(away * away, 0) / size + eps) * scale
        out += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    else:
        out = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps) * scale
    tl.store(normed + row + c, out.to(kind), mask=known)


def launch_add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `layer.add_layer_norm`, or `layer.add_rms_norm` if there is no bias."""
    assert x.is_contiguous() and delta.is_contiguous() and x.shape == delta.shape
    rows, size = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    if rows:
        _add_norm[(rows,)](
            x,
            delta,
            weight,
            bias,
            total,
            normed,
            eps,
            size=size,
            columns=triton.next_power_of_2(size),
            centred=bias is not None,
            num_warps=max(1, min(MAX_WARPS, triton.next_power_of_2(size) // WARP_VALUES)),
        )
    return total, normed


@triton.jit
def _gate(gate_up, out, size: tl.constexpr, block: tl.constexpr, tanh: tl.constexpr):
    """Program (row, block of values): act(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * block + tl.arange(0, block)
    known = c < size
    at = gate_up + row * (2 * size) + c
    kind = out.dtype.element_ty
    left = tl.load(at, mask=known, other=0.0).to(tl.float32)
    right = tl.load(at + size, mask=known, other=0.0).to(tl.float32)
    gated = activated(left, tanh).to(kind).to(tl.float32)  # rounded as the reference does
    tl.store(out + row * size + c, (gated * right).to(kind), mask=known)


def launch_gate(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """Compute `layer.gate`.

    act: one of `GATES`.
    """
    assert gate_up.is_contiguous() and act in GATES
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate[rows, triton.cdiv(size, GATE_VALUES)](
            gate_up, out, size=size, block=GATE_VALUES, tanh=act == "gelu_tanh", num_warps=4
        )
    return out
