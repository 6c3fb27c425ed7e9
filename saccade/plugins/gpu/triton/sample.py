"""Samples one token per row of logits in a Triton kernel, without sorting the vocabulary.

The nucleus and the sampled token are found by a search over the bit patterns of the logits. Each
pass over the row sums the probability mass above a few pivots, always in the same order, so that a
row's token depends only on its logits and its random number.

The likely tokens (candidates) are first copied in order, because there are few of them unless
logits are flat. If the sampled token must be one of them, the search reads only them.

Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# ruff: noqa: RUF005  # Triton adds tuples, and does not unpack them

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from saccade.kernels import device
from saccade.kernels.device import send
from saccade.kernels.reference import sample as reference
from saccade.kernels.reference.sample import COLUMNS, SamplingRows

BLOCK = 2048
"""Logits of a row that are processed at a time, by 16 warps. One row occupies a multiprocessor. If
there are more slots than multiprocessors, a block is half as large, and two rows share one.
"""
PIVOTS = tl.constexpr(4)
"""Pivots tested per pass. More pivots would slow a pass by more than the saved passes gain."""
NATS = tl.constexpr((12.0, 6.0, 3.0))
"""The distances of the first pivots of a search below the best logit, in units of its factor."""
REACH = tl.constexpr(9.0)
"""Candidates are at most this far below the best logit, in units of the row's factor. A row whose
probabilities follow Zipf's law has e^9 = 8,103 of them.
"""
GROUPS = tl.constexpr(64)
"""A row with top-k below this has so many candidates: at least one from each of GROUPS parts."""
ROOM = tl.constexpr(8192)
"""Maximum number of candidates. A row that has more is searched as a whole."""
SURE = tl.constexpr(1.0 - 1e-9)
"""Fraction of the candidates' mass within which rounding cannot lead to another token."""
FACTOR = tl.constexpr(reference.FACTOR)
LIMIT = tl.constexpr(reference.LIMIT)
SHARE = tl.constexpr(reference.SHARE)
FLOOR = tl.constexpr(reference.FLOOR)
LOWEST = tl.constexpr(-(2**31))
APART = tl.constexpr(2**32 - 1)
FAR = tl.constexpr(2**31 - 1)
"""A token index beyond the vocabulary."""


@triton.jit
def row_block(logits, masks, free, at, vocab, block: tl.constexpr, has_mask: tl.constexpr):
    """(logits, mask of allowed tokens) for tokens [at, at + block). free: bits that are set
    regardless of the mask; all bits for a row without a mask.
    """
    c = at + tl.arange(0, block)
    here = c < vocab
    x = tl.load(logits + c, mask=here, other=float("-inf"))
    if has_mask:
        words = tl.load(masks + c // 32, mask=here, other=0) | free
        here = here & (((words >> (c % 32)) & 1) != 0)
    return tl.where(here, x, float("-inf")), here


@triton.jit
def order_of(x):
    """Map float32 to integers that compare in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def masses(
    logits,
    masks,
    free,
    vocab,
    pivots,
    low,
    high,
    best,
    inverse,
    floor,
    counting,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(mass above each pivot, gap, other gap): the mass of the tokens whose order is above each of
    `pivots`; the distance from `low` to the next token's order above it, and from `high` to the
    next one below it.

    Masses are relative to the best token's, and those below `floor` are ignored. counting: each
    token has mass 1. Each lane sums in float64, and the lanes' sums are added once at the end.
    """
    above = ()
    for _ in tl.static_range(PIVOTS):
        above = above + (tl.zeros([block], tl.float64),)
    # Unsigned, so that tokens on the other side wrap around to the largest distances.
    rise, fall = tl.full([block], APART, tl.uint32), tl.full([block], APART, tl.uint32)
    for at in tl.range(0, vocab, block):
        x, here = row_block(logits, masks, free, at, vocab, block, has_mask)
        weight = tl.where(counting, 1.0, tl.exp((x - best) * inverse))
        wide = tl.where(here & (weight >= floor), weight, 0.0).to(tl.float64)
        order = order_of(x)
        rise = tl.minimum(rise, (order - low).to(tl.uint32, bitcast=True))
        fall = tl.minimum(fall, (high - order).to(tl.uint32, bitcast=True))
        sums = ()
        for i in tl.static_range(PIVOTS):
            sums = sums + (above[i] + tl.where(order > pivots[i], wide, 0.0),)
        above = sums
    found = ()
    for i in tl.static_range(PIVOTS):
        found = found + (tl.sum(above[i], 0),)
    return found, tl.min(rise, 0).to(tl.int64), tl.min(fall, 0).to(tl.int64)


@triton.jit
def gather(
    logits,
    masks,
    free,
    vocab,
    cut,
    best,
    inverse,
    floor,
    near,
    places,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(number of candidates, their mass, the mass of all tokens), as in `masses`. Candidates have
    an order above `cut`. Copies the logits and tokens of the first ROOM of them to `near` and
    `places`, in the order of tokens.
    """
    everything = tl.zeros([block], tl.float64)
    close, number = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for at in tl.range(0, vocab, block):
        x, here = row_block(logits, masks, free, at, vocab, block, has_mask)
        weight = tl.exp((x - best) * inverse)
        wide = tl.where(here & (weight >= floor), weight, 0.0).to(tl.float64)
        found = here & (order_of(x) > cut)
        everything += wide
        count = tl.sum(found.to(tl.int32), 0)
        if count > 0:
            index = number + tl.cumsum(found.to(tl.int32), 0) - 1
            fits = found & (index < ROOM)
            tl.store(near + index, x, mask=fits)
            tl.store(places + index, at + tl.arange(0, block), mask=fits)
            number += count
            close += tl.sum(tl.where(found, wide, 0.0), 0)
    tl.debug_barrier()  # other threads of the program read what these have written
    return number, close, tl.sum(everything, 0)


@triton.jit
def among(number, close, everything, vocab, limit, share, point):
    """True if the sampled token is among the candidates, whose mass is `close`."""
    limited = (limit > 0) & (limit < vocab)
    part = tl.where(share < 1.0, share.to(tl.float64), point)
    held = tl.where(limited, number > limit, part * everything < close * SURE)
    return held & (number <= ROOM)


@triton.jit
def pivots_of(low, high, best, factor, first):
    """Pivots evenly between two orders. In the first pass, just below the best token, and one below
    all tokens.
    """
    span = high.to(tl.int64) - low.to(tl.int64)
    pivots = ()
    for i in tl.static_range(PIVOTS):
        even = (low + span * (i + 1) // (PIVOTS + 1)).to(tl.int32)
        begin = low - 1 if i == 0 else order_of(best - NATS[i - 1] * factor)
        pivots = pivots + (tl.where(first, begin, even),)
    return pivots


@triton.jit
def between(low, high, over, pivots, above, bound, inclusive):
    """Narrow `low` and `high` by the masses above the pivots, and update the mass above `high`."""
    for i in tl.static_range(PIVOTS - 1, -1, -1):
        fits = (above[i] < bound) | (inclusive & (above[i] <= bound))
        fits = fits & (pivots[i] >= low) & (pivots[i] < high)
        high = tl.where(fits, pivots[i], high)
        over = tl.where(fits, above[i], over)
    for i in tl.static_range(PIVOTS):
        low = tl.where(pivots[i] < high, tl.maximum(low, pivots[i] + 1), low)
    return low, high, over


@triton.jit
def search(
    logits,
    masks,
    free,
    vocab,
    part,
    least,
    best,
    factor,
    floor,
    everything,
    counting,
    inclusive,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(order, mass above, bound): the lowest order, from `least` up, whose mass above is less than
    the bound (inclusive: at most the bound). The bound is the fraction `part` of the mass from
    `least` up, or a number of tokens if `counting`. That of all tokens is `everything`, also where
    `logits` are candidates.

    Each pass over the row tests several orders, and moves the range's ends to orders of tokens.
    """
    low, high = least, order_of(best)
    over = tl.zeros([], tl.float64)
    bound = part
    first = True
    while (low < high) | first:
        pivots = pivots_of(low, high, best, factor, first)
        above, rise, fall = masses(
            logits,
            masks,
            free,
            vocab,
            pivots,
            low,
            high,
            best,
            1.0 / factor,
            floor,
            counting,
            block,
            has_mask,
        )
        if first & (counting == 0):
            bound = part * tl.where(least == LOWEST + 1, everything, above[0])
        bottom, top = low + rise, high - fall
        low, high, over = between(low, high, over, pivots, above, bound, inclusive)
        low = tl.maximum(low, tl.minimum(bottom, high)).to(tl.int32)
        high = tl.maximum(low, tl.minimum(top, high)).to(tl.int32)
        first = False
    return high, over, bound


@triton.jit
def cut_down(
    logits,
    masks,
    free,
    vocab,
    limit,
    share,
    point,
    best,
    factor,
    floor,
    everything,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(order, mass above, bound) of the sampled token: apply top-k, then top-p, then find the token
    at `point` of the remaining mass.
    """
    order = tl.full([], LOWEST + 1, tl.int32)
    over, bound = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for cut in tl.range(0, 3):
        part = point
        wanted = cut == 2
        if cut == 0:
            part = limit.to(tl.float64)
            wanted = (limit > 0) & (limit < vocab)
        if cut == 1:
            part = share.to(tl.float64)
            wanted = share < 1.0
        if wanted:
            order, over, bound = search(
                logits,
                masks,
                free,
                vocab,
                part,
                order,
                best,
                factor,
                floor,
                everything,
                cut == 0,
                cut == 2,
                block,
                has_mask,
            )
    return order, over, bound


@triton.jit
def best_of(logits, masks, free, vocab, block: tl.constexpr, has_mask: tl.constexpr):
    """(the best logit, its token, a lower logit). Of equal logits, the first token wins. The lower
    logit is the least of the best ones of GROUPS parts of the row.
    """
    best, place = tl.full([block], float("-inf"), tl.float32), tl.zeros([block], tl.int32)
    for at in tl.range(0, vocab, block):
        x, _ = row_block(logits, masks, free, at, vocab, block, has_mask)
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, at + tl.arange(0, block), place)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, place, FAR), 0)
    parts: tl.constexpr = min(GROUPS, block)
    return top, winner, tl.min(tl.max(tl.reshape(best, [parts, block // parts]), 1), 0)


@triton.jit
def place_of(
    logits, masks, free, vocab, order, winner, block: tl.constexpr, has_mask: tl.constexpr
):
    """(number of tokens of this order, the first such token or else `winner`)."""
    number, place = tl.zeros([block], tl.int32), tl.full([block], FAR, tl.int32)
    for at in tl.range(0, vocab, block):
        x, here = row_block(logits, masks, free, at, vocab, block, has_mask)
        equal = here & (order_of(x) == order)
        number += equal.to(tl.int32)
        place = tl.minimum(place, tl.where(equal, at + tl.arange(0, block), FAR))
    first = tl.min(place, 0)
    return tl.sum(number, 0), tl.where(first < FAR, first, winner)


@triton.jit
def pick_equal(
    logits,
    masks,
    free,
    vocab,
    order,
    over,
    share,
    best,
    inverse,
    winner,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """Of the tokens of one order, the one at which the cumulative mass passes `share`, by index. If
    rounding leaves none, the last of them; if there are no such tokens, `winner`.
    """
    found = tl.full([], FAR, tl.int32)
    passed = tl.zeros([], tl.int32)
    last = winner
    for at in tl.range(0, vocab, block):
        x, here = row_block(logits, masks, free, at, vocab, block, has_mask)
        c = at + tl.arange(0, block)
        equal = here & (order_of(x) == order)
        count = tl.sum(equal.to(tl.int32), 0)
        if count > 0:
            each = tl.exp((tl.max(tl.where(equal, x, float("-inf")), 0) - best) * inverse)
            index = passed + tl.cumsum(equal.to(tl.int32), 0)
            covers = over + index.to(tl.float64) * each.to(tl.float64) > share
            found = tl.minimum(found, tl.min(tl.where(equal & covers, c, FAR), 0))
            last = tl.max(tl.where(equal, c, 0), 0)
            passed += count
    return tl.where(found < FAR, found, last)


# The alignment of these depends on the size of the step. Do not compile a variant for each.
@triton.jit(do_not_specialize_on_alignment=["lines", "slots", "uniforms"])
def _sample(
    logits,
    masks,
    lines,
    slots,
    table,
    uniforms,
    near,
    places,
    tokens,
    vocab,
    row_stride,
    mask_stride,
    columns: tl.constexpr,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """Program (row). table: one row of parameters per slot. lines: each row's mask, or -1. near and
    places: memory for ROOM candidates per row.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    free = 0
    if has_mask:
        line = tl.load(lines + row)
        free = tl.where(line >= 0, 0, -1)
        masks += tl.maximum(line, 0) * mask_stride
    slot = tl.load(slots + row)
    table += slot * columns
    factor = tl.load(table + FACTOR)
    limit = tl.load(table + LIMIT).to(tl.int32)
    part = tl.load(table + SHARE)
    floor = tl.load(table + FLOOR)
    best, winner, lower = best_of(logits, masks, free, vocab, block, has_mask)
    if factor <= 0.0:
        tl.store(tokens + row, winner.to(tl.int64))
        return
    near += row * ROOM
    places += row * ROOM
    point = tl.load(uniforms + row)
    inverse = 1.0 / factor
    cut = order_of(best - REACH * factor)
    if (limit > 0) & (limit < vocab):
        cut = tl.minimum(cut, order_of(lower) - 1)
    count, close, everything = gather(
        logits, masks, free, vocab, cut, best, inverse, floor, near, places, block, has_mask
    )
    held = among(count, close, everything, vocab, limit, part, point)
    # From here on, the candidates are in place of the row. None of them is masked.
    logits = tl.where(held, near, logits)
    vocab = tl.where(held, count, vocab)
    free = tl.where(held, -1, free)
    other = tl.where(held, FAR, winner)
    order, over, bound = cut_down(
        logits,
        masks,
        free,
        vocab,
        limit,
        part,
        point,
        best,
        factor,
        floor,
        everything,
        block,
        has_mask,
    )
    number, token = place_of(logits, masks, free, vocab, order, other, block, has_mask)
    if number > 1:
        token = pick_equal(
            logits, masks, free, vocab, order, over, bound, best, inverse, other, block, has_mask
        )
    token = tl.load(places + token, mask=held & (token < vocab), other=token)
    token = tl.where(token < FAR, token, winner)
    tl.store(tokens + row, token.to(tl.int64))


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Compute `reference.sample.sample` in one launch, which also applies the masks."""
    if rows.masks is None:
        if all(columns[reference.FACTOR] == 0.0 for columns in rows.columns):
            return logits.argmax(dim=-1)  # uses several programs per row, unlike the kernel
        return launch_sample(logits, rows.slots, rows.table, rows.points)
    lines = np.full(len(logits), -1, np.int64)
    lines[list(rows.masks.rows)] = np.arange(len(rows.masks.rows))
    masks = rows.masks.masks, send(lines, logits.device)
    return launch_sample(logits, rows.slots, rows.table, rows.points, *masks)


def launch_sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    uniforms: torch.Tensor,
    masks: torch.Tensor | None = None,
    lines: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token [D] int64 per row of `logits` [D, V] float32.

    slots: [D] int64, the rows' indices in `table`.
    table: float32 [slots, COLUMNS] (`reference.sample`).
    uniforms: [D] float64, points in the cumulative distribution, which starts with the best token.
    masks: [M, ceil(V / 32)] int32, bits of the allowed tokens, at least one in each mask.
    lines: [D] int64, each row's index in `masks`, or -1 for a row without a mask.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and table.is_contiguous()
    if masks is not None:
        assert lines is not None and masks.shape[1] == -(-vocab // 32), "each row has a line"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    near = torch.empty((rows, ROOM.value), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, ROOM.value), dtype=torch.int32, device=logits.device)
    if rows:
        # Not by the number of rows: the order of sums, and so a sample, must not depend on others.
        crowded = len(table) > device.multiprocessors(logits.device)
        block = min(BLOCK // 2 if crowded else BLOCK, triton.next_power_of_2(vocab))
        _sample[(rows,)](
            logits,
            logits if masks is None else masks,
            slots if lines is None else lines,
            slots,
            table,
            uniforms,
            near,
            places,
            tokens,
            vocab,
            logits.stride(0),
            0 if masks is None else masks.stride(0),
            columns=COLUMNS,
            block=block,
            has_mask=masks is not None,
            num_warps=8 if crowded else 16,
        )
    return tokens
