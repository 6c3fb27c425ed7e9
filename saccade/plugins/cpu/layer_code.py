"""Numba code of the kernels of `layer.py`, compiled at first use (`kernel_object.py`). Each
function returns the body of a kernel for the given sizes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import numba
import numpy as np

from saccade.plugins.cpu.jit import (
    bf16_to_f32,
    bits_to_f32,
    exponential,
    f32_to_bf16,
    float32_ptr,
    int64_ptr,
    maximum,
    minimum,
    next_item,
    uint8_ptr,
    uint16_ptr,
)
from saccade.plugins.cpu.kernel_object import Body


@numba.njit(inline="always")
def _same(value):
    return value


WEIGHTS = (uint16_ptr, bf16_to_f32), (float32_ptr, _same)
"""The pointer type and the conversion with which norm weights are read, in bfloat16 and in
float32.
"""


def rope_and_cache(dim: int, turned: int, across: bool, norm_bits: int) -> Body:
    """Return the body for heads of size `dim`, whose first `turned` values are rotated. One work
    item is one token.

    across: rotate pairs (i, i + turned / 2) instead of (2 i, 2 i + 1).
    norm_bits: bits of the norm's weights, or 0 without a norm.
    """
    half, has_norm = turned // 2, norm_bits > 0
    numbers, widen = WEIGHTS[norm_bits == 32]

    def rope_and_cache(block):
        qkv, q_out, keys, values = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            uint16_ptr(block[4]),
            uint16_ptr(block[5]),
        )
        weight, cos, sin, slots = (
            numbers(block[6]),
            float32_ptr(block[7]),
            float32_ptr(block[8]),
            int64_ptr(block[9]),
        )
        heads, kv_heads, stride, eps = block[10], block[11], block[12], bits_to_f32(block[13])
        while True:
            token = next_item(block)
            if token >= block[1]:
                return
            row, place, angle = token * stride, slots[token] * kv_heads * dim, token * turned
            for head in range(heads + kv_heads):
                at = row + head * dim
                if has_norm:
                    squares = np.float32(0)
                    for d in range(dim):
                        squares += bf16_to_f32(qkv[at + d]) * bf16_to_f32(qkv[at + d])
                    root = np.float32(1) / math.sqrt(squares / np.float32(dim) + eps)
                    for d in range(dim):  # round before the rotation, like the reference
                        qkv[at + d] = f32_to_bf16(
                            bf16_to_f32(qkv[at + d]) * root * widen(weight[head * dim + d])
                        )
                for i in range(half):
                    one, two = (i, i + half) if across else (2 * i, 2 * i + 1)
                    x, y = bf16_to_f32(qkv[at + one]), bf16_to_f32(qkv[at + two])
                    qkv[at + one] = f32_to_bf16(x * cos[angle + one] + y * sin[angle + one])
                    qkv[at + two] = f32_to_bf16(y * cos[angle + two] + x * sin[angle + two])
            for i in range(heads * dim):
                q_out[token * heads * dim + i] = qkv[row + i]
            for i in range(kv_heads * dim):
                keys[place + i] = qkv[row + heads * dim + i]
                values[place + i] = qkv[row + (heads + kv_heads) * dim + i]

    return rope_and_cache


def add_rms_norm(adds: bool, weight_bits: int) -> Body:
    """Return the body of the kernel for `add_rms_norm`. One work item is one row."""
    numbers, widen = WEIGHTS[weight_bits == 32]

    def add_rms_norm(block):
        x, delta, weight, total, normed = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            numbers(block[4]),
            uint16_ptr(block[5]),
            uint16_ptr(block[6]),
        )
        size, eps = block[7], bits_to_f32(block[8])
        while True:
            row = next_item(block)
            if row >= block[1]:
                return
            at = row * size
            squares = np.float32(0)
            if adds:
                for i in range(size):
                    added = f32_to_bf16(bf16_to_f32(x[at + i]) + bf16_to_f32(delta[at + i]))
                    total[at + i] = added
                    squares += bf16_to_f32(added) * bf16_to_f32(added)
            else:
                for i in range(size):
                    squares += bf16_to_f32(x[at + i]) * bf16_to_f32(x[at + i])
            root = np.float32(1) / math.sqrt(squares / np.float32(size) + eps)
            for i in range(size):
                normed[at + i] = f32_to_bf16(bf16_to_f32(total[at + i]) * root * widen(weight[i]))

    return add_rms_norm


def rope() -> Body:
    """Return the body of the kernel for `rotate_`. One work item is one token."""

    def rope(block):
        x, cos, sin = uint16_ptr(block[2]), float32_ptr(block[3]), float32_ptr(block[4])
        heads, stride, dim, half = block[5], block[6], block[7], block[8]
        while True:
            token = next_item(block)
            if token >= block[1]:
                return
            angle = token * 2 * half
            for head in range(heads):
                at = token * stride + head * dim
                for i in range(half):
                    one, two = bf16_to_f32(x[at + i]), bf16_to_f32(x[at + half + i])
                    turned = one * cos[angle + i] + two * sin[angle + i]
                    other = two * cos[angle + half + i] + one * sin[angle + half + i]
                    x[at + i] = f32_to_bf16(turned)
                    x[at + half + i] = f32_to_bf16(other)

    return rope


def layer_norm(adds: bool) -> Body:
    """Return the body of the kernel for `add_layer_norm`. One work item is one row."""

    def layer_norm(block):
        x, delta, weight, bias, total, normed = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            uint16_ptr(block[4]),
            uint16_ptr(block[5]),
            uint16_ptr(block[6]),
            uint16_ptr(block[7]),
        )
        size, eps = block[8], bits_to_f32(block[9])
        while True:
            row = next_item(block)
            if row >= block[1]:
                return
            at = row * size
            added, squares = np.float32(0), np.float32(0)
            if adds:
                for i in range(size):
                    both = f32_to_bf16(bf16_to_f32(x[at + i]) + bf16_to_f32(delta[at + i]))
                    total[at + i] = both
                    added += bf16_to_f32(both)
            else:
                for i in range(size):
                    added += bf16_to_f32(x[at + i])
            mean = added / np.float32(size)
            for i in range(size):
                off = bf16_to_f32(total[at + i]) - mean
                squares += off * off
            root = np.float32(1) / math.sqrt(squares / np.float32(size) + eps)
            for i in range(size):
                off = (bf16_to_f32(total[at + i]) - mean) * root
                normed[at + i] = f32_to_bf16(off * bf16_to_f32(weight[i]) + bf16_to_f32(bias[i]))

    return layer_norm


def sigmoid_gate(most: int) -> Body:
    """Return the body of the kernel for `compiled_sigmoid_gate`. One work item is up to `most`
    values.
    """

    def sigmoid_gate(block):
        values, out, count = uint16_ptr(block[2]), uint16_ptr(block[3]), block[4]
        first, third = bits_to_f32(block[5]), bits_to_f32(block[6])
        while True:
            item = next_item(block)
            if item >= block[1]:
                return
            start = item * most
            for i in range(start, minimum(start + most, count)):
                x = bf16_to_f32(values[i])
                near = minimum(
                    maximum(x, np.float32(-100)), np.float32(100)
                )  # without this, 0 times infinity could occur
                power = exponential(-near * (first + third * near * near))
                out[i] = f32_to_bf16(x / (np.float32(1) + power))

    return sigmoid_gate


def gate_heads() -> Body:
    """Return the body of the kernel for `gate_heads`. One work item is one token."""

    def gate_heads(block):
        x, gates, out, size, stride = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            uint16_ptr(block[4]),
            block[5],
            block[6],
        )
        while True:
            token = next_item(block)
            if token >= block[1]:
                return
            for i in range(size):
                power = exponential(-bf16_to_f32(gates[token * stride + i]))
                # round the gate, like the reference
                share = bf16_to_f32(f32_to_bf16(np.float32(1) / (np.float32(1) + power)))
                out[token * size + i] = f32_to_bf16(bf16_to_f32(x[token * size + i]) * share)

    return gate_heads


def gate(most: int) -> Body:
    """Return the body of the kernel for `gate`. One work item is up to `most` values of a row."""

    def gate(block):
        gate_up, out, size = uint16_ptr(block[2]), uint16_ptr(block[3]), block[4]
        pieces = -(-size // most)
        while True:
            item = next_item(block)
            if item >= block[1]:
                return
            row, start = item // pieces, item % pieces * most
            left, to = row * 2 * size, row * size
            for i in range(start, minimum(start + most, size)):
                x = bf16_to_f32(gate_up[left + i])
                # round before the multiplication, like the reference
                gated = bf16_to_f32(f32_to_bf16(x / (np.float32(1) + exponential(-x))))
                out[to + i] = f32_to_bf16(gated * bf16_to_f32(gate_up[left + size + i]))

    return gate


def centre(patch: int) -> Body:
    """Return the body of the kernel for `centre_patches`. One work item is one row of merged tokens
    in a frame.
    """

    def centre(block):
        image, out = uint8_ptr(block[2]), uint16_ptr(block[3])
        frames, bands, across, merge = block[4], block[5], block[6], block[7]
        one = 3 * patch * patch
        line = 3 * across * merge * patch  # bytes
        while True:
            item = next_item(block)
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
                            out[at] = f32_to_bf16(byte - np.float32(128))

    return centre
