"""Drawing one token per row of logits as a Triton kernel: no sort of the vocabulary.

The tokens that may be drawn, and the one that is, are found by bisection over the logits' own bits:
what is asked at each step is a count or a sum over the row, in the same order every time, so that a
row's draw depends on its logits and its uniform number alone. Knows tensors only.

Imported only where it runs: on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits of a row that are looked at together."""
WARPS = 8
LOWEST = tl.constexpr(-(2**31))
FAR = tl.constexpr(2**31 - 1)
"""A place beyond all tokens."""


@triton.jit
def row_block(logits, masks, free, at, vocab, block: tl.constexpr, has_mask: tl.constexpr):
    """(logits, which of them there are) of places [at, at + block). free: bits that are
    set whatever the mask says; all, for a row that has none.
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
    """An integer for each float32: integers compare as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def measure(
    logits,
    masks,
    free,
    vocab,
    least,
    above,
    best,
    inverse,
    min_p,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(number, mass) of the tokens of order at least `least` and above `above`, whose mass is at
    least `min_p` of the best token's. Masses are relative to the best token's, summed in float64.
    """
    number = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.float64)
    for at in tl.range(0, vocab, block):
        x, here = row_block(logits, masks, free, at, vocab, block, has_mask)
        weight = tl.exp((x - best) * inverse)
        order = order_of(x)
        taken = here & (order >= least) & (order > above) & (weight >= min_p)
        number += tl.sum(taken.to(tl.int64), 0)
        mass += tl.sum(tl.where(taken, weight, 0.0).to(tl.float64), 0)
    return number, mass


@triton.jit
def middle(low, high):
    """Between two integers of 32 bits, rounded down."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def best_of(logits, masks, free, vocab, block: tl.constexpr, has_mask: tl.constexpr):
    """(the best logit, its place): of equals, the first."""
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.zeros([], tl.int32)
    for at in tl.range(0, vocab, block):
        x, _ = row_block(logits, masks, free, at, vocab, block, has_mask)
        top = tl.max(x, 0)
        if top > best:
            best = top
            winner = at + tl.argmax(x, 0, tie_break_left=True)
    return best, winner


@triton.jit
def top_k_order(
    logits, masks, free, vocab, top_k, best, inverse, block: tl.constexpr, has_mask: tl.constexpr
):
    """The highest order that at least `top_k` tokens have or surpass."""
    low, high = tl.full([], LOWEST, tl.int32), order_of(best)
    while low < high:
        mid = middle(low, high) + 1
        number, _ = measure(
            logits, masks, free, vocab, mid, LOWEST, best, inverse, 0.0, block, has_mask
        )
        if number >= top_k:
            low = mid
        else:
            high = mid - 1
    return low


@triton.jit
def top_p_order(
    logits,
    masks,
    free,
    vocab,
    top_p,
    least,
    best,
    inverse,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """The lowest order, from `least` on, above which less than the share `top_p` lies."""
    _, mass = measure(
        logits, masks, free, vocab, least, LOWEST, best, inverse, 0.0, block, has_mask
    )
    low, high = least, order_of(best)
    while low < high:
        mid = middle(low, high)
        _, over = measure(
            logits, masks, free, vocab, least, mid, best, inverse, 0.0, block, has_mask
        )
        if over < top_p * mass:
            high = mid
        else:
            low = mid + 1
    return low


@triton.jit
def drawn_order(
    logits,
    masks,
    free,
    vocab,
    point,
    least,
    best,
    inverse,
    min_p,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """(order, mass above, the point's share): the lowest order above which no more than the share
    `point` lies, which is the drawn token's.
    """
    _, mass = measure(
        logits, masks, free, vocab, least, LOWEST, best, inverse, min_p, block, has_mask
    )
    share = point * mass
    low, high = least, order_of(best)
    over = tl.zeros([], tl.float64)
    while low < high:
        mid = middle(low, high)
        _, more = measure(
            logits, masks, free, vocab, least, mid, best, inverse, min_p, block, has_mask
        )
        if more <= share:
            high = mid
            over = more
        else:
            low = mid + 1
    return low, over, share


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
    """Of the tokens of one order, the one on which the rest of the share falls, by place. Where
    rounding leaves none, the last of them; where there are none, `winner`.
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


# A step's numbers lie where its size has it: nothing is compiled for how they do.
@triton.jit(do_not_specialize_on_alignment=["lines", "slots", "uniforms"])
def _sample(
    logits,
    masks,
    lines,
    slots,
    ways,
    top_ks,
    uniforms,
    tokens,
    vocab,
    row_stride,
    mask_stride,
    block: tl.constexpr,
    has_mask: tl.constexpr,
):
    """Program (row). ways [slots, 3]: temperature, top-p, min-p. lines: whose mask is whose."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    free = 0
    if has_mask:
        line = tl.load(lines + row)
        free = tl.where(line >= 0, 0, -1)
        masks += tl.maximum(line, 0) * mask_stride
    slot = tl.load(slots + row)
    temperature = tl.load(ways + slot * 3)
    top_p = tl.load(ways + slot * 3 + 1)
    min_p = tl.load(ways + slot * 3 + 2)
    top_k = tl.load(top_ks + slot)
    best, winner = best_of(logits, masks, free, vocab, block, has_mask)
    if temperature <= 0.0:
        tl.store(tokens + row, winner.to(tl.int64))
        return
    inverse = 1.0 / temperature
    least = tl.full([], LOWEST, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        least = top_k_order(logits, masks, free, vocab, top_k, best, inverse, block, has_mask)
    if top_p < 1.0:
        share = top_p.to(tl.float64)
        least = top_p_order(
            logits, masks, free, vocab, share, least, best, inverse, block, has_mask
        )
    point = tl.load(uniforms + row)
    order, over, rest = drawn_order(
        logits, masks, free, vocab, point, least, best, inverse, min_p, block, has_mask
    )
    token = pick_equal(
        logits, masks, free, vocab, order, over, rest, best, inverse, winner, block, has_mask
    )
    tl.store(tokens + row, token.to(tl.int64))


def launch_sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    params: torch.Tensor,
    top_ks: torch.Tensor,
    uniforms: torch.Tensor,
    masks: torch.Tensor | None = None,
    lines: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token [D] int64 per row of `logits` [D, V] float32, best first by `uniforms` [D] float64.

    slots [D] int64: lines of params [slots, 3] float32 (temperature, top-p, min-p; temperature 0:
    the best token) and of top_ks [slots] int32 (0: no limit). masks [M, ceil(V / 32)] int32: bits
    of the tokens that may be drawn, at least one each; lines [D] int64: which of them a row has, -1
    for none.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and params.is_contiguous()
    if masks is not None:
        assert lines is not None and masks.shape[1] == -(-vocab // 32), "each row has a line"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _sample[(rows,)](
            logits,
            logits if masks is None else masks,
            slots if lines is None else lines,
            slots,
            params,
            top_ks,
            uniforms,
            tokens,
            vocab,
            logits.stride(0),
            0 if masks is None else masks.stride(0),
            block=min(BLOCK, triton.next_power_of_2(vocab)),
            has_mask=masks is not None,
            num_warps=WARPS,
        )
    return tokens
