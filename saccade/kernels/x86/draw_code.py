"""The instructions of `draw.py`'s kernel, compiled by Numba when a machine first asks for them
(`kernel_object.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.kernels.x86.draw_call import BLOCK, UNDECIDED
from saccade.kernels.x86.jit import (
    claim,
    exponential,
    larger,
    longs,
    real,
    reals,
    smaller,
    words,
)
from saccade.kernels.x86.kernel_object import Body

ABOVE_ONE = 0x3F800001
"""A pattern above 1.0's, which no weight has. Larger positive numbers have larger patterns."""
TOP_K, TOP_P, DRAW = range(3)
"""What bounds the tokens, each from a pattern on, and last the draw itself."""


@numba.njit(inline="always")
def _largest(patterns, count):
    """Return the largest of some numbers: patterns with the signs of integers have their order."""
    most = np.int64(-(1 << 31))
    for at in range(count):
        pattern = patterns[at]
        most = larger(most, np.int64(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    pattern = np.int32(most)
    return real(np.int32(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@numba.njit(inline="always")
def _around(weights, patterns, count, least):
    """Return the mass of the tokens with at least this pattern, and how many there are. Then both
    for those with a larger one.
    """
    mass, many, before, ahead = np.float64(0), np.int64(0), np.float64(0), np.int64(0)
    for at in range(count):
        weight = np.float64(weights[at])
        if patterns[at] >= least:
            mass += weight
            many += 1
        if patterns[at] > least:
            before += weight
            ahead += 1
    return mass, many, before, ahead


@numba.njit(inline="always")
def _about(weights, patterns, count, least):
    """Return the mass from this pattern on, and how many, in float32: whoever asks looks again at
    what it finds.
    """
    mass, many = np.float32(0), np.float32(0)
    bound = np.int32(least)
    for at in range(count):
        there = np.float32(patterns[at] >= bound)
        mass += there * weights[at]
        many += there
    return mass, many


@numba.njit(inline="always")
def _reach(weights, patterns, count, target, limit):
    """Return the largest pattern from which on there is more mass than `target`, and `limit` tokens
    or more.
    """
    low, high = np.int64(0), np.int64(ABOVE_ONE)
    while high - low > 1:
        middle = (low + high) // 2
        mass, many = _about(weights, patterns, count, middle)
        if np.float64(mass) > target and many >= limit:
            low = middle
        else:
            high = middle
    return low


@numba.njit(inline="always")
def _find(patterns, vocab, wanted, out):
    """Write the place of the last pattern that is `wanted`."""
    for first in range(0, vocab, BLOCK):
        end = smaller(first + BLOCK, vocab)
        equal = np.float32(0)
        for at in range(first, end):
            equal += np.float32(patterns[at] == wanted)
        for at in range(first, end if equal > np.float32(0) else first):
            if patterns[at] == wanted:
                out[0] = at


def draw() -> Body:
    """Return the body that draws one token of a row, or leaves it UNDECIDED."""

    def draw(block):
        logits, weights, patterns = reals(block[2]), reals(block[3]), words(block[3])
        out, vocab, top_k = longs(block[4]), block[5], block[6]
        factor, top_p, min_p = real(block[7]), real(block[8]), np.float64(real(block[9]))
        point, rounding = np.float64(real(block[10])), np.float64(real(block[11]))
        kept, kept_patterns, room = reals(block[12]), words(block[12]), block[13]
        unlikely = real(block[14])
        while claim(block) < block[1]:
            out[0] = UNDECIDED
            largest = _largest(words(block[2]), vocab) / factor
            # the likely tokens of a large vocabulary stand for all of it, where they decide
            total, count = np.float64(0), np.int64(0)
            least_kept = np.float32(0) if vocab <= room else unlikely
            for first in range(0, vocab, BLOCK):
                end = smaller(first + BLOCK, vocab)
                mass = np.float32(0)
                for at in range(first, end):
                    weight = exponential(logits[at] / factor - largest)
                    weights[at] = weight
                    mass += weight
                total += np.float64(mass)
                some = np.float32(0)
                for at in range(first, end):
                    some += np.float32(weights[at] >= least_kept)
                if some > np.float32(0):
                    for at in range(first, end):
                        if weights[at] >= least_kept:
                            if count < room:
                                kept[count] = weights[at]
                            count += 1
            if count > room:
                continue
            # the tokens that are open to the draw: those from a pattern on
            least = np.int64(0)
            if min_p > 0:
                near, many, likely = np.int64(0), np.int64(0), np.float64(0)
                lowest = np.int64(ABOVE_ONE)
                for at in range(count):
                    each = np.float64(kept[at])
                    if abs(each - min_p) < rounding * min_p:
                        near += 1
                    if each >= min_p:
                        many += 1
                        likely += each
                        lowest = smaller(lowest, np.int64(kept_patterns[at]))
                if near > 0 or many == 0 or (many == count and count < vocab):
                    continue
                least, total = lowest, likely
            slack = np.float64(0)
            for stage in range(TOP_K, DRAW + 1):
                limit, goal = np.int64(0), point * total
                if stage == TOP_K:
                    if top_k <= 0 or top_k >= vocab:
                        continue
                    limit, goal = top_k, np.float64(-1)
                elif stage == TOP_P:
                    slack = rounding * total
                    if top_p >= np.float32(1):
                        continue
                    goal = np.float64(top_p) * total
                found = _reach(kept, kept_patterns, count, goal, limit)
                mass, many, before, ahead = _around(kept, kept_patterns, count, found)
                sure = many == top_k
                if stage != TOP_K:
                    apart = ahead == 0 or goal - before >= slack
                    sure = apart and mass - goal >= slack and many - ahead == 1 and found >= least
                if not sure:
                    break
                if found > least:
                    least, total = found, mass
            else:
                _find(patterns, vocab, np.int32(found), out)

    return draw
