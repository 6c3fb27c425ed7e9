"""The functions of `layer.py` for bfloat16 on CPUs, one pass each: what PyTorch writes to memory
between two operations stays in registers here. Knows tensors only.

Imported only where it runs (`ops.X86Ops`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.x86.jit import (
    Kernel,
    bits,
    claim,
    exponential,
    halves,
    longs,
    narrow,
    octets,
    real,
    reals,
    wide,
)

GATE_VALUES = 4096
"""Values that one item of `_gate` makes."""


@cache
def _turn_and_cache(dim: int, turned: int, across: bool, has_norm: bool) -> Kernel:
    """Compile the kernel for heads with `dim` values, where the first `turned` are turned.

    An item is a token. across: pairs are halves.
    """
    half = turned // 2

    def turn_and_cache(block):
        qkv, q_out, keys, values = (
            halves(block[2]),
            halves(block[3]),
            halves(block[4]),
            halves(block[5]),
        )
        weight, cos, sin, slots = (
            halves(block[6]),
            reals(block[7]),
            reals(block[8]),
            longs(block[9]),
        )
        heads, kv_heads, stride, eps = block[10], block[11], block[12], real(block[13])
        while True:
            token = claim(block)
            if token >= block[1]:
                return
            row, place, angle = token * stride, slots[token] * kv_heads * dim, token * turned
            for head in range(heads + kv_heads):
                at = row + head * dim
                if has_norm:
                    squares = np.float32(0)
                    for d in range(dim):
                        squares += wide(qkv[at + d]) * wide(qkv[at + d])
                    root = np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)
                    for d in range(dim):  # rounded where the reference rounds: before the turn
                        qkv[at + d] = narrow(
                            wide(qkv[at + d]) * root * wide(weight[head * dim + d])
                        )
                for i in range(half):
                    one, two = (i, i + half) if across else (2 * i, 2 * i + 1)
                    x, y = wide(qkv[at + one]), wide(qkv[at + two])
                    qkv[at + one] = narrow(x * cos[angle + one] + y * sin[angle + one])
                    qkv[at + two] = narrow(y * cos[angle + two] + x * sin[angle + two])
            for i in range(heads * dim):
                q_out[token * heads * dim + i] = qkv[row + i]
            for i in range(kv_heads * dim):
                keys[place + i] = qkv[row + heads * dim + i]
                values[place + i] = qkv[row + (heads + kv_heads) * dim + i]

    return Kernel(turn_and_cache)


def compiled_turn_and_cache(
    qkv: torch.Tensor,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_norm: QKNorm | None,
    cache: PagedCache,
    out_slots: torch.Tensor,
    *,
    across: bool,
) -> torch.Tensor:
    """Do as `layer.turn_and_cache`. cos, sin: tables [T, R] from a rotation that is ready."""
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    keys, values = cache.keys, cache.values
    assert qkv.stride(2) == 1 and qkv.stride(1) == dim, "a token's heads lie back to back"
    assert keys.is_contiguous() and values.is_contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    weight, eps = qk_norm or (None, 0.0)
    assert weight is None or weight.is_contiguous()
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
    _turn_and_cache(dim, cos.shape[1], across, weight is not None)(
        tokens,
        qkv.numel(),
        qkv.data_ptr(),
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out_slots.data_ptr(),
        heads,
        kv_heads,
        qkv.stride(0),
        bits(eps),
    )
    return q


@cache
def _add_rms_norm(adds: bool) -> Kernel:
    """Compile the kernel. An item is a row."""

    def add_rms_norm(block):
        x, delta, weight, total, normed = (
            halves(block[2]),
            halves(block[3]),
            halves(block[4]),
            halves(block[5]),
            halves(block[6]),
        )
        size, eps = block[7], real(block[8])
        while True:
            row = claim(block)
            if row >= block[1]:
                return
            at = row * size
            squares = np.float32(0)
            if adds:
                for i in range(size):
                    added = narrow(wide(x[at + i]) + wide(delta[at + i]))
                    total[at + i] = added
                    squares += wide(added) * wide(added)
            else:
                for i in range(size):
                    squares += wide(x[at + i]) * wide(x[at + i])
            root = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
            for i in range(size):
                normed[at + i] = narrow(wide(total[at + i]) * root * wide(weight[i]))

    return Kernel(add_rms_norm)


def compiled_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `layer.add_rms_norm`. Without `delta`, return `x` and its norm."""
    assert x.is_contiguous() and weight.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    size = x.shape[-1]
    _add_rms_norm(delta is not None)(
        x.numel() // size,
        x.numel(),
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        size,
        bits(eps),
    )
    return total, normed


@cache
def _turn() -> Kernel:
    """Compile the kernel. An item is a token."""

    def turn(block):
        x, cos, sin = halves(block[2]), reals(block[3]), reals(block[4])
        heads, stride, dim, half = block[5], block[6], block[7], block[8]
        while True:
            token = claim(block)
            if token >= block[1]:
                return
            angle = token * 2 * half
            for head in range(heads):
                at = token * stride + head * dim
                for i in range(half):
                    one, two = wide(x[at + i]), wide(x[at + half + i])
                    turned = one * cos[angle + i] + two * sin[angle + i]
                    other = two * cos[angle + half + i] + one * sin[angle + half + i]
                    x[at + i] = narrow(turned)
                    x[at + half + i] = narrow(other)

    return Kernel(turn)


def compiled_turn(rotation: Rotation, x: torch.Tensor) -> None:
    """Do as `rotary.rotate_` with halves, where `turns`."""
    ready = rotation.ready()
    cos, sin = ready.cos.contiguous(), ready.sin.contiguous()
    tokens, heads, dim = x.shape
    numbers = heads, x.stride(0), dim, cos.shape[1] // 2
    _turn()(tokens, x.numel(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *numbers)


@cache
def _layer_norm(adds: bool) -> Kernel:
    """Compile the kernel. An item is a row."""

    def layer_norm(block):
        x, delta, weight, bias, total, normed = (
            halves(block[2]),
            halves(block[3]),
            halves(block[4]),
            halves(block[5]),
            halves(block[6]),
            halves(block[7]),
        )
        size, eps = block[8], real(block[9])
        while True:
            row = claim(block)
            if row >= block[1]:
                return
            at = row * size
            added, squares = np.float32(0), np.float32(0)
            if adds:
                for i in range(size):
                    both = narrow(wide(x[at + i]) + wide(delta[at + i]))
                    total[at + i] = both
                    added += wide(both)
            else:
                for i in range(size):
                    added += wide(x[at + i])
            mean = added / np.float32(size)
            for i in range(size):
                off = wide(total[at + i]) - mean
                squares += off * off
            root = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
            for i in range(size):
                off = (wide(total[at + i]) - mean) * root
                normed[at + i] = narrow(off * wide(weight[i]) + wide(bias[i]))

    return Kernel(layer_norm)


def compiled_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `layer.add_layer_norm`. Without `delta`, return `x` and its norm."""
    assert x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    size = x.shape[-1]
    _layer_norm(delta is not None)(
        x.numel() // size,
        x.numel(),
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        size,
        bits(eps),
    )
    return total, normed


@cache
def _sigmoid_gate() -> Kernel:
    """Compile the kernel. An item is up to `GATE_VALUES` values."""

    def sigmoid_gate(block):
        values, out, count = halves(block[2]), halves(block[3]), block[4]
        first, third = real(block[5]), real(block[6])
        while True:
            item = claim(block)
            if item >= block[1]:
                return
            start = item * GATE_VALUES
            for i in range(start, min(start + GATE_VALUES, count)):
                x = wide(values[i])
                near = min(max(x, np.float32(-100)), np.float32(100))  # else 0 times infinity
                power = exponential(-near * (first + third * near * near))
                out[i] = narrow(x / (np.float32(1) + power))

    return Kernel(sigmoid_gate)


def compiled_sigmoid_gate(x: torch.Tensor, first: float, third: float) -> torch.Tensor:
    """Compute `x * sigmoid(first * x + third * x^3)`."""
    assert x.is_contiguous()
    out, count = torch.empty_like(x), x.numel()
    numbers = x.data_ptr(), out.data_ptr(), count, bits(first), bits(third)
    _sigmoid_gate()(-(-count // GATE_VALUES), count, *numbers)
    return out


@cache
def _gate() -> Kernel:
    """Compile the kernel. An item is up to `GATE_VALUES` values from a row."""

    def gate(block):
        gate_up, out, size = halves(block[2]), halves(block[3]), block[4]
        pieces = -(-size // GATE_VALUES)
        while True:
            item = claim(block)
            if item >= block[1]:
                return
            row, start = item // pieces, item % pieces * GATE_VALUES
            left, to = row * 2 * size, row * size
            for i in range(start, min(start + GATE_VALUES, size)):
                x = wide(gate_up[left + i])
                # rounded as the reference does
                gated = wide(narrow(x / (np.float32(1) + exponential(-x))))
                out[to + i] = narrow(gated * wide(gate_up[left + size + i]))

    return Kernel(gate)


def compiled_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Do as `layer.gate` with SiLU."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    _gate()(rows * -(-size // GATE_VALUES), out.numel(), gate_up.data_ptr(), out.data_ptr(), size)
    return out


@cache
def _centre(patch: int) -> Kernel:
    """Compile the kernel. An item is a row of merged tokens in a frame."""

    def centre(block):
        image, out = octets(block[2]), halves(block[3])
        frames, bands, across, merge = block[4], block[5], block[6], block[7]
        one = 3 * patch * patch
        line = 3 * across * merge * patch  # bytes
        while True:
            item = claim(block)
            if item >= block[1]:
                return
            frame, band = item // bands, item % bands
            for place in range(across * merge * merge):
                token, row, column = place // (merge * merge), place // merge % merge, place % merge
                to = ((band * across * merge * merge + place) * frames + frame) * one
                top = (item * merge + row) * patch * line
                corner = top + 3 * patch * (token * merge + column)
                for y in range(patch):
                    for x in range(patch):
                        for channel in range(3):
                            byte = np.float32(image[corner + y * line + 3 * x + channel])
                            at = to + (channel * patch + y) * patch + x
                            out[at] = narrow(byte - np.float32(128))

    return Kernel(centre)


def compiled_centre(frames: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Do as `patchify.centre_patches` in bfloat16."""
    assert frames.is_contiguous() and frames.shape[3] == 3
    count, height, width, _ = frames.shape
    bands, across = height // (merge * patch), width // (merge * patch)
    rows = bands * across * merge**2
    out = torch.empty((rows, count * 3 * patch**2), dtype=torch.bfloat16)
    _centre(patch)(
        count * bands,
        out.numel(),
        frames.data_ptr(),
        out.data_ptr(),
        count,
        bands,
        across,
        merge,
    )
    return out
