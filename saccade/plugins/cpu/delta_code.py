"""Numba code of the kernels of `delta.py`, compiled at first use (`kernel_object.py`). Each
function returns the body of a kernel for the given sizes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ARG001 (Numba determines the arguments of an intrinsic)

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from saccade.plugins.cpu.jit import (
    F32,
    bf16_to_f32,
    bits_to_f32,
    count_up,
    declare,
    exponential,
    f32_to_bf16,
    float32_ptr,
    int32_ptr,
    int64_ptr,
    local,
    maximum,
    minimum,
    next_item,
    uint16_ptr,
)
from saccade.plugins.cpu.kernel_object import Body
from saccade.plugins.cpu.llvm import broadcast

LOG1P = 1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0
"""Coefficients of log((1 + z) / (1 - z)) / (2 z) in powers of z^2, the highest power first. For z
up to 1/3, the relative error is 1e-8.
"""


def delta_gates() -> Body:
    """Return the body of the kernel for `delta_gates`. One work item is one token."""
    factors = tuple(np.float32(factor) for factor in LOG1P)

    def delta_gates(block):
        both, bias, rate = uint16_ptr(block[2]), float32_ptr(block[3]), float32_ptr(block[4])
        decay, beta, heads = float32_ptr(block[5]), float32_ptr(block[6]), block[7]
        while True:
            token = next_item(block)
            if token >= block[1]:
                return
            for head in range(heads):
                at = token * 2 * heads + head
                x = bf16_to_f32(both[at])
                to = token * heads + head
                # round to bfloat16, like the reference
                beta[to] = bf16_to_f32(
                    f32_to_bf16(np.float32(1) / (np.float32(1) + exponential(-x)))
                )
                x = bf16_to_f32(both[at + heads]) + bias[head]
                y = exponential(-abs(x))
                z = y / (np.float32(2) + y)
                square, series = z * z, np.float32(0)
                for factor in factors:
                    series = series * square + factor
                softplus = maximum(x, np.float32(0)) + np.float32(2) * z * series
                decay[to] = softplus * rate[head]

    return delta_gates


def causal_conv(taps: int, width: int, silu: bool) -> Body:
    """Return the body of the kernel for `causal_conv`. One work item is up to `width` channels, for
    all rows.

    Each token runs the same instructions at any position in its row, so results do not depend on
    chunk boundaries.
    """
    before = taps - 1

    def causal_conv(block):
        weight, out, states = uint16_ptr(block[3]), uint16_ptr(block[4]), uint16_ptr(block[5])
        sums = float32_ptr(block[6])
        starts, lengths, lines, keeps = (
            int32_ptr(block[7]),
            int32_ptr(block[8]),
            int64_ptr(block[9]),
            int64_ptr(block[10]),
        )
        keeping = block[10] != 0
        rows, channels, stride, line_stride = block[11], block[12], block[13], block[14]
        while True:
            item = next_item(block)
            if item >= block[1]:
                return
            first = item * width
            count, total = minimum(width, channels - first), item * width
            for row in range(rows):
                start, length = starts[row], starts[row + 1] - starts[row]
                if not lengths[row]:
                    for token in range(start, start + length):
                        for c in range(count):
                            out[token * channels + first + c] = np.uint16(0)
                    continue
                if not length:
                    continue
                state = lines[row] * line_stride + first
                if lengths[row] == length:
                    for tap in range(before):
                        for c in range(count):
                            states[state + tap * channels + c] = np.uint16(0)
                for token in range(length):
                    for c in range(count):
                        sums[total + c] = np.float32(0)
                    for tap in range(taps):
                        at = token + tap - before
                        source = block[5] + 2 * (state + (token + tap) * channels)
                        if at >= 0:
                            source = block[2] + 2 * ((start + at) * stride + first)
                        inputs, factor = uint16_ptr(source), tap * channels + first
                        for c in range(count):
                            sums[total + c] += bf16_to_f32(inputs[c]) * bf16_to_f32(
                                weight[factor + c]
                            )
                    to = (start + token) * channels + first
                    for c in range(count):
                        value = sums[total + c]
                        if silu:
                            value = value / (np.float32(1) + exponential(-value))
                        out[to + c] = f32_to_bf16(value)
                for tap in range(before):
                    at = length + tap - before
                    source = block[5] + 2 * (state + (length + tap) * channels)
                    if at >= 0:
                        source = block[2] + 2 * ((start + at) * stride + first)
                    inputs = uint16_ptr(source)
                    for c in range(count):
                        states[state + tap * channels + c] = inputs[c]
                if keeping and keeps[row] >= 0:
                    kept = keeps[row] * line_stride + first
                    for tap in range(before):
                        for c in range(count):
                            states[kept + tap * channels + c] = states[state + tap * channels + c]

    return causal_conv


def _pass_over(key_dim: int, width: int):
    """Return an intrinsic that updates `width` columns of a state [key_dim, value_dim], and
    multiplies them with a key and a query, in one pass.
    """
    vector = ir.VectorType(F32, width)

    @intrinsic
    def pass_over(context, state, stride, last, decay, fresh, key, query, read):
        """Compute state = decay * state + outer(last, fresh), then read = [key, query] @ state.

        last, key, query: addresses of float32 [key_dim].
        fresh: address of float32 [width].
        read: address of float32 [2, width].
        stride: row stride of the state in bytes.
        """

        def build(context, builder, signature, arguments):
            b, (state, stride, last, decay, fresh, key, query, read) = builder, arguments
            kind = ir.FunctionType(vector, [vector] * 3)
            fma = declare(b.module, kind, f"llvm.fmuladd.v{width}f32")

            def at(address, kind=F32):
                return b.inttoptr(address, kind.as_pointer())

            def element(address, index):
                return broadcast(b, b.load(b.gep(at(address), [index])), width)

            added, grown = b.load(at(fresh, vector), align=4), broadcast(b, decay, width)
            reads = [local(b, ir.Constant(vector, None)) for _ in range(2)]
            with count_up(b, ir.IntType(64)(key_dim)) as loop:
                row = at(b.add(state, b.mul(stride, loop.index)), vector)
                values = b.fmul(b.load(row, align=4), grown)
                values = b.call(fma, [element(last, loop.index), added, values])
                b.store(values, row, align=4)
                for total, by in zip(reads, (key, query)):
                    b.store(b.call(fma, [element(by, loop.index), values, b.load(total)]), total)
            for index, total in enumerate(reads):
                to = b.add(read, ir.IntType(64)(4 * width * index))
                b.store(b.load(total), at(to, vector), align=4)
            return context.get_dummy_value()

        numbers = (types.int64,) * 3
        return types.none(*numbers, types.float32, *(types.int64,) * 4), build

    return pass_over


def gated_delta(key_dim: int, value_dim: int, width: int, group: int) -> Body:
    """Return the body of the kernel for `gated_delta`. One work item is `width` columns of a head's
    states, for all rows.

    Tokens are computed one after another, so results do not depend on chunk boundaries.
    """
    pass_over = _pass_over(key_dim, width)
    blocks, scale = value_dim // width, np.float32(key_dim**-0.5)
    size = 3 * key_dim + 4 * width

    def gated_delta(block):
        q, k, v, out = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            uint16_ptr(block[4]),
            uint16_ptr(block[5]),
        )
        decay, beta, states, memory = (
            float32_ptr(block[6]),
            float32_ptr(block[7]),
            float32_ptr(block[8]),
            float32_ptr(block[9]),
        )
        starts, lengths, lines, keeps = (
            int32_ptr(block[10]),
            int32_ptr(block[11]),
            int64_ptr(block[12]),
            int64_ptr(block[13]),
        )
        keeping = block[13] != 0
        rows, heads, stride, line_stride, eps = (
            block[14],
            block[15],
            block[16],
            block[17],
            bits_to_f32(block[18]),
        )
        while True:
            item = next_item(block)
            if item >= block[1]:
                return
            head, column = item // blocks, item % blocks * width
            mine = item * size
            query, key, last = mine, mine + key_dim, mine + 2 * key_dim
            fresh = mine + 3 * key_dim
            read = fresh + width
            base = block[9]
            for row in range(rows):
                start, end = starts[row], starts[row + 1]
                if not lengths[row]:
                    for token in range(start, end):
                        for c in range(width):
                            at = (token * heads + head) * value_dim + column + c
                            out[at] = np.uint16(0)
                    continue
                if start == end:
                    continue
                state = lines[row] * line_stride + head * key_dim * value_dim + column
                if lengths[row] == end - start:
                    for d in range(key_dim):
                        for c in range(width):
                            states[state + d * value_dim + c] = np.float32(0)
                for d in range(key_dim):
                    memory[last + d] = np.float32(0)
                for c in range(width):
                    memory[fresh + c] = np.float32(0)
                grown = np.float32(1)
                for token in range(start, end + 1):  # the last iteration only updates the state
                    both = np.float32(0)
                    if token < end:
                        at = token * stride + head // group * key_dim
                        squares, other = np.float32(0), np.float32(0)
                        for d in range(key_dim):
                            squares += bf16_to_f32(q[at + d]) * bf16_to_f32(q[at + d])
                            other += bf16_to_f32(k[at + d]) * bf16_to_f32(k[at + d])
                        root = scale / math.sqrt(squares + eps)
                        unit = np.float32(1) / math.sqrt(other + eps)
                        for d in range(key_dim):
                            memory[query + d] = bf16_to_f32(q[at + d]) * root
                            memory[key + d] = bf16_to_f32(k[at + d]) * unit
                        for d in range(key_dim):
                            both += memory[query + d] * memory[key + d]
                    pass_over(
                        block[8] + 4 * state,
                        4 * value_dim,
                        base + 4 * last,
                        grown,
                        base + 4 * fresh,
                        base + 4 * key,
                        base + 4 * query,
                        base + 4 * read,
                    )
                    if token == end:
                        break
                    gate = token * heads + head
                    grown, part = exponential(decay[gate]), beta[gate]
                    values, to = token * stride + head * value_dim, gate * value_dim
                    for c in range(width):
                        known = grown * memory[read + c]
                        added = (bf16_to_f32(v[values + column + c]) - known) * part
                        memory[fresh + c] = added
                        result = grown * memory[read + width + c] + both * added
                        out[to + column + c] = f32_to_bf16(result)
                    key, last = last, key
                if keeping and keeps[row] >= 0:
                    kept = keeps[row] * line_stride + head * key_dim * value_dim + column
                    for d in range(key_dim):
                        for c in range(width):
                            at = d * value_dim + c
                            states[kept + at] = states[state + at]

    return gated_delta


def gated_rms_norm() -> Body:
    """Return the body of the kernel for `gated_rms_norm`. One work item is one token."""

    def gated_rms_norm(block):
        x, gate, weight, out = (
            uint16_ptr(block[2]),
            uint16_ptr(block[3]),
            uint16_ptr(block[4]),
            uint16_ptr(block[5]),
        )
        heads, dim, stride, eps = block[6], block[7], block[8], bits_to_f32(block[9])
        while True:
            token = next_item(block)
            if token >= block[1]:
                return
            for head in range(heads):
                at, gated = (token * heads + head) * dim, token * stride + head * dim
                squares = np.float32(0)
                for d in range(dim):
                    squares += bf16_to_f32(x[at + d]) * bf16_to_f32(x[at + d])
                root = np.float32(1) / math.sqrt(squares / np.float32(dim) + eps)
                for d in range(dim):
                    g = bf16_to_f32(gate[gated + d])
                    normed = bf16_to_f32(
                        f32_to_bf16(bf16_to_f32(x[at + d]) * root * bf16_to_f32(weight[d]))
                    )
                    out[at + d] = f32_to_bf16(normed * (g / (np.float32(1) + exponential(-g))))

    return gated_rms_norm
