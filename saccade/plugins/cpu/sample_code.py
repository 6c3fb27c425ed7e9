"""Numba code of the kernel of `sample.py`, compiled at first use (`kernel_object.py`).

A token's weight is a float from 0 to 1. Its pattern is the weight's bits as an integer, so patterns
have the same order as weights.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numba
import numpy as np

from saccade.plugins.cpu.jit import (
    bits_to_f32,
    exponential,
    float32_ptr,
    int32_ptr,
    int64_ptr,
    maximum,
    minimum,
    next_item,
)
from saccade.plugins.cpu.kernel_object import Body
from saccade.plugins.cpu.numba_call import BLOCK_TOKENS, UNDECIDED

ABOVE_ONE = 0x3F800001
"""The pattern after the pattern of 1.0, which exceeds the pattern of every weight."""
LIMIT, SHARE, DRAW = range(3)
"""Stages: LIMIT (top-k) and SHARE (top-p) raise the minimum pattern of the candidates. DRAW finds
the pattern of the sampled token.
"""


@numba.njit(inline="always")
def _largest(patterns, count):
    """Return the maximum of `count` floats, given their bits. Flipping all but the sign bit of
    negative floats gives integers in the same order.
    """
    most = np.int64(-(1 << 31))
    for at in range(count):
        pattern = patterns[at]
        most = maximum(most, np.int64(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    pattern = np.int32(most)
    return bits_to_f32(np.int32(pattern ^ ((pattern >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@numba.njit(inline="always")
def _around(weights, patterns, count, least):
    """Return two pairs of total weight and number of tokens: for tokens whose pattern is at least
    `least`, and for tokens whose pattern is larger.
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
    """Return the total weight and number of tokens whose pattern is at least `least`, in float32.
    The caller checks the result with `_around`, which is more precise.
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
    """Return the largest pattern for which the tokens with at least this pattern have a total
    weight above `target`, and number at least `limit`.
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
    """Write the index of the last pattern that equals `wanted` to out[0]."""
    for first in range(0, vocab, BLOCK_TOKENS):
        end = minimum(first + BLOCK_TOKENS, vocab)
        equal = np.float32(0)
        for at in range(first, end):
            equal += np.float32(patterns[at] == wanted)
        for at in range(first, end if equal > np.float32(0) else first):
            if patterns[at] == wanted:
                out[0] = at


def sample() -> Body:
    """Return the body that samples one row's token, or writes UNDECIDED."""

    def sample(block):
        logits, weights, patterns = (
            float32_ptr(block[2]),
            float32_ptr(block[3]),
            int32_ptr(block[3]),
        )
        out, vocab, most = int64_ptr(block[4]), block[5], block[6]
        factor, share, floor = (
            bits_to_f32(block[7]),
            bits_to_f32(block[8]),
            np.float64(bits_to_f32(block[9])),
        )
        point, rounding = np.float64(bits_to_f32(block[10])), np.float64(bits_to_f32(block[11]))
        kept, kept_patterns, room = float32_ptr(block[12]), int32_ptr(block[12]), block[13]
        unlikely = bits_to_f32(block[14])
        while next_item(block) < block[1]:
            out[0] = UNDECIDED
            largest = _largest(int32_ptr(block[2]), vocab) / factor
            # of a large vocabulary, keep the likely tokens only
            total, count = np.float64(0), np.int64(0)
            least_kept = np.float32(0) if vocab <= room else unlikely
            for first in range(0, vocab, BLOCK_TOKENS):
                end = minimum(first + BLOCK_TOKENS, vocab)
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
            # candidates are the tokens with at least this pattern
            least = np.int64(0)
            if floor > 0:
                near, many, likely = np.int64(0), np.int64(0), np.float64(0)
                lowest = np.int64(ABOVE_ONE)
                for at in range(count):
                    each = np.float64(kept[at])
                    if abs(each - floor) < rounding * floor:
                        near += 1
                    if each >= floor:
                        many += 1
                        likely += each
                        lowest = minimum(lowest, np.int64(kept_patterns[at]))
                if near > 0 or many == 0 or (many == count and count < vocab):
                    continue
                least, total = lowest, likely
            slack = np.float64(0)
            for stage in range(LIMIT, DRAW + 1):
                limit, goal = np.int64(0), point * total
                if stage == LIMIT:
                    if most <= 0 or most >= vocab:
                        continue
                    limit, goal = most, np.float64(-1)
                elif stage == SHARE:
                    slack = rounding * total
                    if share >= np.float32(1):
                        continue
                    goal = np.float64(share) * total
                found = _reach(kept, kept_patterns, count, goal, limit)
                mass, many, before, ahead = _around(kept, kept_patterns, count, found)
                sure = many == most
                if stage != LIMIT:
                    apart = ahead == 0 or goal - before >= slack
                    sure = apart and mass - goal >= slack and many - ahead == 1 and found >= least
                if not sure:
                    break
                if found > least:
                    least, total = found, mass
            else:
                _find(patterns, vocab, np.int32(found), out)

    return sample
