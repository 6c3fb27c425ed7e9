"""The functions of `delta.py` as Triton kernels.

A program computes a few columns of one head's state, which are independent of the others, and keeps
them in registers for all tokens of a sequence. Sequences with one token advance by token, others by
chunk, as in `delta.chunked_scan`. The inverse of a chunk's equations does not depend on the state,
and is computed for all chunks at once. Grids depend only on the numbers of sequences and tokens.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from saccade.kernels.reference.delta import LENGTH_EPS, StateRows
from saccade.plugins.gpu.triton.paged import find_row

CHANNELS = 256
"""Number of convolution channels per program."""
TOKENS = 16
"""Number of convolution tokens per program, if sequences have several tokens."""
COLUMNS = 32
"""Maximum columns of a state per program, if sequences have one token."""
LEAST = 16
"""Minimum rows and columns of a product on tensor cores."""
STEP = ["lines", "q_starts", "kv_lengths"]
"""Arguments that are views of the staging buffer of a step."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """The tokens per chunk, the precision of products, and a program's layout, with at most
    `columns` columns of a state.
    """

    tokens: int
    precision: str
    columns: int = 16
    warps: int = 4
    stages: int = 1


HALF = Chunked(64, "ieee")
"""For 16-bit values: the operands of products are rounded to the values' dtype."""
WIDE = Chunked(32, "tf32x3")
"""For 32-bit values: operands are split into two parts, which take twice the memory."""


@triton.jit
def _inputs(x, state, at, here, channel, known, x_stride, channels, taps: tl.constexpr):
    """The inputs at positions `at` of a row, [N, C] float32. Positions -1, -2, ... are the inputs
    before the first token, from the state. Inputs are 0 where `here` is false.
    """
    inside = (here & (at >= 0))[:, None] & known[None, :]
    new = tl.load(
        x + at.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=inside, other=0.0
    )
    before = (here & (at < 0))[:, None] & known[None, :]
    old_at = state + (taps - 1 + at).to(tl.int64)[:, None] * channels + channel[None, :]
    old = tl.load(old_at, mask=before, other=0.0)
    return new.to(tl.float32) + old.to(tl.float32)


# The alignment of these depends on the size of the step. Do not compile a variant for each.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=STEP)
def _conv(
    x,
    weight,
    states,
    lines,
    q_starts,
    kv_lengths,
    out,
    rows,
    x_stride,
    line_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    silu: tl.constexpr,
    block_q: tl.constexpr,
    block_c: tl.constexpr,
):
    """Program (block of `block_q` tokens of one row, block of channels)."""
    row, token = find_row(q_starts, 0, rows, tl.program_id(0), block_q)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    if (token >= count) | (length == 0):
        return
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    known = channel < channels
    place = token + tl.arange(0, block_q)
    state = states + tl.load(lines + row) * line_stride
    first = x + start.to(tl.int64) * x_stride
    total = tl.zeros((block_q, block_c), dtype=tl.float32)
    for tap in tl.static_range(taps):
        at = place - (taps - 1) + tap
        here = (place < count) & ((at >= 0) | ((at * 0 + length) > count))
        values = _inputs(first, state, at, here, channel, known, x_stride, channels, taps)
        part = tl.load(weight + tap * channels + channel, mask=known, other=0.0).to(tl.float32)
        total += values * part[None, :]
    if silu:
        total *= tl.sigmoid(total)
    to = out + (start + place).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(place < count)[:, None] & known[None, :])


@triton.jit(do_not_specialize_on_alignment=STEP)
def _remember(
    x,
    states,
    lines,
    q_starts,
    kv_lengths,
    x_stride,
    line_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    block_t: tl.constexpr,
    block_c: tl.constexpr,
):
    """Program (row, block of channels): save the row's last inputs, once `_conv` has read the old
    ones.
    """
    row = tl.program_id(0)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    if (count == 0) | (length == 0):
        return
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    known = channel < channels
    t = tl.arange(0, block_t)
    at = count - (taps - 1) + t
    here = (t < taps - 1) & ((at >= 0) | ((at * 0 + length) > count))
    state = states + tl.load(lines + row) * line_stride
    first = x + start.to(tl.int64) * x_stride
    values = _inputs(first, state, at, here, channel, known, x_stride, channels, taps)
    tl.debug_barrier()  # all threads must have read the old inputs before they are overwritten
    to = state + t[:, None] * channels + channel[None, :]
    mask = (t < taps - 1)[:, None] & known[None, :]
    tl.store(to, values.to(states.dtype.element_ty), mask=mask)


def launch_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """Compute `delta.causal_conv` in two launches."""
    assert x.stride(1) == 1 and weight.is_contiguous() and states.stride(1) == x.shape[1]
    taps, channels = weight.shape
    out = torch.zeros((len(x), channels), dtype=x.dtype, device=x.device)
    count = len(rows.kv_lengths)
    if not len(x):
        return out
    block_q = 1 if rows.singles == count else TOKENS
    columns = triton.cdiv(channels, CHANNELS)
    _conv[len(x) // block_q + count, columns](
        x,
        weight,
        states,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        out,
        count,
        x.stride(0),
        states.stride(0),
        channels=channels,
        taps=taps,
        silu=silu,
        block_q=block_q,
        block_c=CHANNELS,
        num_warps=4,
    )
    _remember[count, columns](
        x,
        states,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        x.stride(0),
        states.stride(0),
        channels=channels,
        taps=taps,
        block_t=triton.next_power_of_2(taps - 1),
        block_c=CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=STEP)
def _delta(
    q,
    k,
    v,
    decay,
    beta,
    states,
    lines,
    q_starts,
    kv_lengths,
    out,
    scale,
    eps,
    token_stride,
    line_stride,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
):
    """Program (row, value head, block of columns of the state)."""
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    if (count == 0) | (length == 0):
        return
    i = tl.arange(0, block_k)
    j = tl.program_id(2) * block_v + tl.arange(0, block_v)
    tile = (i < key_dim)[:, None] & (j < value_dim)[None, :]
    line = states + tl.load(lines + row) * line_stride + head * key_dim * value_dim
    places = line + i[:, None] * value_dim + j[None, :]
    goes_on = (i * 0 + length) > count
    state = tl.load(places, mask=tile & goes_on[:, None], other=0.0)
    for t in tl.range(0, count):
        token = (start + t).to(tl.int64)
        at = token * token_stride + (head // group) * key_dim + i
        query = tl.load(q + at, mask=i < key_dim, other=0.0).to(tl.float32)
        key = tl.load(k + at, mask=i < key_dim, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        value_at = v + token * token_stride + head * value_dim + j
        value = tl.load(value_at, mask=j < value_dim, other=0.0).to(tl.float32)
        state *= tl.exp(tl.load(decay + token * heads + head))
        known = tl.sum(state * key[:, None], 0)
        correction = (value - known) * tl.load(beta + token * heads + head)
        state += key[:, None] * correction[None, :]
        read = tl.sum(state * query[:, None], 0)
        to = out + (token * heads + head) * value_dim + j
        tl.store(to, read.to(out.dtype.element_ty), mask=j < value_dim)
    tl.store(places, state, mask=tile)


@triton.jit
def _unit_rows(x, c, here, i, stride, dim, eps):
    """Load heads of queries or keys from `x` as unit vectors [C, D] float32; 0 where not `here`."""
    known = here[:, None] & (i < dim)[None, :]
    values = tl.load(x + c[:, None] * stride + i[None, :], mask=known, other=0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 1) + eps)[:, None]


@triton.jit(do_not_specialize=["first", "rows"], do_not_specialize_on_alignment=["q_starts"])
def _solve(
    k,
    decay,
    beta,
    q_starts,
    solved,
    eps,
    first,
    rows,
    token_stride,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    block_k: tl.constexpr,
    chunk: tl.constexpr,
    precision: tl.constexpr,
):
    """Program (chunk of one of the rows [first, rows), value head): the inverse of I + A [C, C], by
    forward substitution.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    row, token = find_row(q_starts, first, rows, block, chunk)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    if token >= count:
        return
    c = tl.arange(0, chunk)
    here = token + c < count
    i = tl.arange(0, block_k)
    begin = (start + token).to(tl.int64)
    keys = k + begin * token_stride + (head // group) * key_dim
    key = _unit_rows(keys, c, here, i, token_stride, key_dim, eps)
    at = begin * heads + head
    since = tl.cumsum(tl.load(decay + at + c * heads, mask=here, other=0.0), 0)
    share = tl.load(beta + at + c * heads, mask=here, other=0.0)
    key = key.to(k.dtype.element_ty)
    earlier = c[:, None] > c[None, :]
    between = tl.exp(tl.where(earlier, since[:, None] - since[None, :], float("-inf")))
    system = tl.dot(key, tl.trans(key), input_precision=precision) * between * share[:, None]
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for r in tl.range(1, chunk):
        mine = (c == r)[:, None]
        known = tl.sum(tl.where(mine, system, 0.0), 0)  # row r's coefficients for earlier rows
        inverse -= tl.where(mine, tl.sum(known[:, None] * inverse, 0)[None, :], 0.0)
    to = solved + (block.to(tl.int64) * heads + head) * chunk * chunk
    tl.store(to + c[:, None] * chunk + c[None, :], inverse)


@triton.jit
def _advance(query, key, value, decays, share, inverse, state, c, precision: tl.constexpr):
    """(the values read by a chunk's tokens [C, V], the next state). Operands have the dtype of
    `value`; sums and states are float32.
    """
    kind = value.dtype
    since, whole = tl.cumsum(decays, 0), tl.sum(decays, 0)
    grown = tl.exp(since)[:, None]
    before = state.to(kind)
    wanted = value.to(tl.float32) - tl.dot(key, before, input_precision=precision) * grown
    weighed = (wanted * share[:, None]).to(kind)
    correction = tl.dot(inverse.to(kind), weighed, input_precision=precision)
    seen = c[:, None] >= c[None, :]
    between = tl.exp(tl.where(seen, since[:, None] - since[None, :], float("-inf")))
    within = tl.dot(query, tl.trans(key), input_precision=precision) * between
    read = tl.dot(query, before, input_precision=precision) * grown
    read += tl.dot(within.to(kind), correction.to(kind), input_precision=precision)
    left = (correction * tl.exp(whole - since)[:, None]).to(kind)
    state = state * tl.exp(whole)
    return read, state + tl.dot(tl.trans(key), left, input_precision=precision)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=STEP)
def _scan(
    q,
    k,
    v,
    decay,
    beta,
    solved,
    states,
    lines,
    q_starts,
    kv_lengths,
    out,
    scale,
    eps,
    first,
    token_stride,
    line_stride,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    chunk: tl.constexpr,
    precision: tl.constexpr,
):
    """Program (row from `first` on, value head, block of columns of the state)."""
    row, head = first + tl.program_id(0), tl.program_id(1)
    start = tl.load(q_starts + row)
    count = tl.load(q_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    if (count == 0) | (length == 0):
        return
    c, i = tl.arange(0, chunk), tl.arange(0, block_k)
    j = tl.program_id(2) * block_v + tl.arange(0, block_v)
    tile = (i < key_dim)[:, None] & (j < value_dim)[None, :]
    line = states + tl.load(lines + row) * line_stride + head * key_dim * value_dim
    places = line + i[:, None] * value_dim + j[None, :]
    goes_on = (i * 0 + length) > count
    state = tl.load(places, mask=tile & goes_on[:, None], other=0.0)
    block = (start - tl.load(q_starts + first)) // chunk + row - first  # as in `find_row`
    for token in tl.range(0, count, chunk):
        here = token + c < count
        begin = (start + token).to(tl.int64)
        at = begin * heads + head
        key_at = begin * token_stride + (head // group) * key_dim
        kind = v.dtype.element_ty
        key = _unit_rows(k + key_at, c, here, i, token_stride, key_dim, eps).to(kind)
        decays = tl.load(decay + at + c * heads, mask=here, other=0.0)
        share = tl.load(beta + at + c * heads, mask=here, other=0.0)
        known = here[:, None] & (j < value_dim)[None, :]
        values_at = v + begin * token_stride + head * value_dim
        value = tl.load(values_at + c[:, None] * token_stride + j[None, :], mask=known, other=0.0)
        inverse_at = solved + ((block + token // chunk).to(tl.int64) * heads + head) * chunk * chunk
        inverse = tl.load(inverse_at + c[:, None] * chunk + c[None, :])
        query = (_unit_rows(q + key_at, c, here, i, token_stride, key_dim, eps) * scale).to(kind)
        read, state = _advance(query, key, value, decays, share, inverse, state, c, precision)
        to = out + at * value_dim + c[:, None] * (heads * value_dim) + j[None, :]
        tl.store(to, read.to(kind), mask=known)
    tl.store(places, state, mask=tile)


def launch_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    chunked: Chunked | None = None,
) -> torch.Tensor:
    """Compute `delta.gated_delta` in at most three launches, without host synchronization.

    chunked: overrides the default chunks, in measurements and tests.
    """
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    # with a single token, its stride is arbitrary and irrelevant
    assert tokens == 1 or (q.stride() == k.stride() and q.stride(0) == v.stride(0))
    assert q.stride(1) == key_dim and v.stride(1) == value_dim and v.stride(2) == 1
    assert decay.is_contiguous() and beta.is_contiguous()
    assert states.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    out = torch.zeros((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if rows.singles:
        _launch_steps(q, k, v, decay, beta, states, rows, out)
    if len(rows.kv_lengths) > rows.singles and tokens > rows.singles:
        chunked = chunked or (HALF if v.element_size() == 2 else WIDE)
        _launch_chunks(q, k, v, decay, beta, states, rows, out, chunked)
    return out


def _launch_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Launch the kernel for the first rows, each of which has one token."""
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = q.shape[1:]
    block_v = min(COLUMNS, triton.next_power_of_2(value_dim))
    _delta[rows.singles, heads, triton.cdiv(value_dim, block_v)](
        q,
        k,
        v,
        decay,
        beta,
        states,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        out,
        key_dim**-0.5,
        LENGTH_EPS,
        v.stride(0),
        states.stride(0),
        heads=heads,
        group=heads // key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_k=triton.next_power_of_2(key_dim),
        block_v=block_v,
        num_warps=4,
    )


def _constants(q: torch.Tensor, v: torch.Tensor, chunked: Chunked) -> dict[str, Any]:
    """Return the compile-time arguments that `_solve` and `_scan` share."""
    heads, key_dim = v.shape[1], q.shape[2]
    return {
        "heads": heads,
        "group": heads // q.shape[1],
        "key_dim": key_dim,
        "block_k": max(LEAST, triton.next_power_of_2(key_dim)),
        "chunk": chunked.tokens,
        "precision": chunked.precision,
        "num_warps": chunked.warps,
        "num_stages": chunked.stages,
    }


def _launch_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    chunked: Chunked,
) -> None:
    """Launch the kernels for the remaining rows, which have several tokens."""
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    first, count = rows.singles, len(rows.kv_lengths)
    blocks = (tokens - first) // chunked.tokens + count - first
    block_v = min(chunked.columns, max(LEAST, triton.next_power_of_2(value_dim)))
    solved = torch.empty(
        (blocks, heads, chunked.tokens, chunked.tokens), dtype=torch.float32, device=v.device
    )
    shape = _constants(q, v, chunked)
    _solve[blocks, heads](
        k,
        decay,
        beta,
        rows.q_starts,
        solved,
        LENGTH_EPS,
        first,
        count,
        v.stride(0),
        **shape,
    )
    _scan[count - first, heads, triton.cdiv(value_dim, block_v)](
        q,
        k,
        v,
        decay,
        beta,
        solved,
        states,
        rows.lines,
        rows.q_starts,
        rows.kv_lengths,
        out,
        key_dim**-0.5,
        LENGTH_EPS,
        first,
        v.stride(0),
        states.stride(0),
        value_dim=value_dim,
        block_v=block_v,
        **shape,
    )
