"""The instructions of `draw.py`'s kernel, compiled by Numba when a machine first asks for them
(`kernel.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.kernels.x86.draw_call import BLOCK, UNDECIDED
from saccade.kernels.x86.jit import claim, exponential, longs, real, reals, words
from saccade.kernels.x86.kernel import Body

ABOVE_ONE = 0x3F800001
"""A pattern above 1.0's, which no weight has. Larger positive numbers have larger patterns."""


@numba.njit(inline="always")
def _largest(patterns, count):
    """Return the largest of some numbers: patterns with the signs of integers have their order."""
    most = np.int64(-(1 << 31))
    for at in range(count):
        pattern = patterns[at]
        most = max(most, np.int64(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    pattern = np.int32(most)
    return real(np.int32(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@numba.njit(inline="always")
def _above(weights, patterns, count, least):
    """Return the mass of the tokens with at least this pattern, and how many there are."""
    mass, many = np.float64(0), np.int64(0)
    for at in range(count):
        if patterns[at] >= least:
            mass += np.float64(weights[at])
            many += 1
    return mass, many


@numba.njit(inline="always")
def _about(weights, patterns, count, least):
    """Do as `_above`, in float32: whoever asks looks again at what it finds."""
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
                end = min(first + BLOCK, vocab)
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
            if 0 < top_k < vocab:
                if top_k > count:
                    continue
                least = _reach(kept, kept_patterns, count, np.float64(-1), top_k)
                total, many = _above(kept, kept_patterns, count, least)
                if many != top_k:
                    continue
            if min_p > 0:
                near, many = np.int64(0), np.int64(0)
                lowest = np.int64(ABOVE_ONE)
                for at in range(count):
                    weight = np.float64(kept[at])
                    if abs(weight - min_p) < rounding * min_p:
                        near += 1
                    if weight >= min_p:
                        many += 1
                        lowest = min(lowest, np.int64(kept_patterns[at]))
                if near > 0 or many == 0 or (many == count and count < vocab):
                    continue
                if lowest > least:
                    least = lowest
                    total, _ = _above(kept, kept_patterns, count, least)
            slack = rounding * total
            if top_p < np.float32(1):
                bound = np.float64(top_p) * total
                found = _reach(kept, kept_patterns, count, bound, 0)
                mass, many = _above(kept, kept_patterns, count, found)
                before, ahead = _above(kept, kept_patterns, count, found + 1)
                near = abs(mass - bound) < slack or (ahead > 0 and abs(bound - before) < slack)
                if found < least or mass <= bound or near or many - ahead != 1:
                    continue
                least, total = found, mass
            target = point * total
            found = _reach(kept, kept_patterns, count, target, 0)
            mass, many = _above(kept, kept_patterns, count, found)
            before, ahead = _above(kept, kept_patterns, count, found + 1)
            if found < least or mass <= target or mass - target < slack:
                continue
            if many - ahead != 1 or (ahead > 0 and target - before < slack):
                continue
            for first in range(0, vocab, BLOCK):
                end = min(first + BLOCK, vocab)
                equal, wanted = np.float32(0), np.int32(found)
                for at in range(first, end):
                    equal += np.float32(patterns[at] == wanted)
                for at in range(first, end if equal > np.float32(0) else first):
                    if patterns[at] == np.int32(found):
                        out[0] = at

    return draw
