"""The sampling kernel's search draws what a bisection of all 32 bits of the logits does, which it
took the place of: both rules written down in numpy, on 100,000 rows of a small vocabulary.

Both are given the same masses (float32, summed in float64 over a whole row), so that the rules are
compared, not the order of sums. The kernel itself draws what its rule says here: on a few hundred
rows in Triton's interpreter; `test_sample.py` has it beside what CPUs run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.sample import launch_sample

VOCAB = 96
LOWEST, PIVOTS, NATS = -(2**31), 4, (12.0, 6.0, 3.0)
Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def orders_of(x: npt.NDArray[np.float32]) -> Integers:
    bits = x.view(np.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)


class Rows:
    """R rows of logits, each with a way to draw, and what lies above an order."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(0, 3, (count, VOCAB)).astype(np.float32)
        x[::3] = np.round(x[::3])  # many are equal
        x[::5] *= 0.01
        x[1::50] = rng.choice(np.array([-np.inf, 1, 2], np.float32), (len(x[1::50]), VOCAB))
        x[:, 0] = np.where(np.isinf(x).all(1), 0.0, x[:, 0])
        self.logits = x
        self.best = x.max(1)
        self.orders = orders_of(x)
        self.temperature = rng.choice(np.array([0.3, 0.8, 1.0, 2.0], np.float32), count)
        inverse = np.float32(1.0) / self.temperature
        self.weights = np.exp((x - self.best[:, None]) * inverse[:, None])
        self.top_k = rng.choice(np.array([0, 0, 1, 5, 40, VOCAB + 5]), count)
        # as the kernel has it: a share is what float32 makes of it
        self.top_p = rng.choice(np.array([1.0, 1.0, 0.95, 0.6, 1e-4], np.float32), count)
        self.min_p = rng.choice(np.array([0.0, 0.0, 0.1, 0.5], np.float32), count)
        # The bisection cut by min-p last: beside other cuts it was another definition.
        self.min_p[((self.top_k > 0) & (self.top_k < VOCAB)) | (self.top_p < 1)] = 0
        self.points = rng.random(count)
        self.wide = np.where(
            self.weights >= self.min_p[:, None], self.weights, np.float32(0)
        ).astype(np.float64)
        self.ones = np.ones_like(self.wide)
        self.top = self.orders.max(1)

    def above(self, order: Integers, counting: bool = False) -> Reals:
        """[R]: the mass, or the number, of tokens above an order each."""
        values = self.ones if counting else self.wide
        found: Reals = np.where(self.orders > order[:, None], values, 0.0).sum(1)
        return found

    def from_on(self, least: Integers) -> Reals:
        return self.above(least - 1)

    @property
    def cut_by_number(self) -> npt.NDArray[np.bool_]:
        return (self.top_k > 0) & (self.top_k < VOCAB)


def bisected(rows: Rows) -> tuple[Integers, Reals, Reals]:
    """(order drawn, mass above, share): each bit of an order by a pass of its own."""

    def search(least: Integers, fits: Callable[[Integers], npt.NDArray[np.bool_]]) -> Integers:
        low, high = least.copy(), rows.top.copy()
        while (low < high).any():
            mid = (low + high) >> 1
            good, open_ = fits(mid), low < high
            high = np.where(open_ & good, mid, high)
            low = np.where(open_ & ~good, mid + 1, low)
        return low

    least = np.full(len(rows.top), LOWEST)
    # Highest order that at least top_k tokens have or surpass: at that of the last that does not.
    low, high = least.copy(), rows.top.copy()
    while (low < high).any():
        mid = ((low + high) >> 1) + 1
        good, open_ = rows.above(mid - 1, counting=True) >= rows.top_k, low < high
        low, high = np.where(open_ & good, mid, low), np.where(open_ & ~good, mid - 1, high)
    least = np.where(rows.cut_by_number, low, least)
    bound = rows.top_p.astype(np.float64) * rows.from_on(least)
    cut = search(least, lambda mid: rows.above(mid) < bound)
    least = np.where(rows.top_p < 1, cut, least)
    share = rows.points * rows.from_on(least)
    order = search(least, lambda mid: rows.above(mid) <= share)
    return order, rows.above(order), share


def searched(rows: Rows) -> tuple[Integers, Reals, Reals]:
    """The same by four orders a pass, as `sample_gpu.search`."""
    order = np.full(len(rows.top), LOWEST + 1)
    over, share = np.zeros(len(order)), np.zeros(len(order))
    cuts = (
        (rows.cut_by_number, rows.top_k.astype(np.float64)),
        (rows.top_p < 1, rows.top_p.astype(np.float64)),
        (np.ones(len(order), np.bool_), rows.points),
    )
    for cut, (wanted, part) in enumerate(cuts):
        high, mass, bound = search(rows, part, order, cut == 0, cut == 2)
        order = np.where(wanted, high, order)
        over, share = np.where(wanted, mass, over), np.where(wanted, bound, share)
    return order, over, share


def search(
    rows: Rows, part: Reals, least: Integers, counting: bool, inclusive: bool
) -> tuple[Integers, Reals, Reals]:
    low, high = least.copy(), rows.top.copy()
    over, bound = np.zeros(len(low)), part.copy()
    first = True
    while first or (low < high).any():
        open_ = (low < high) | first
        if first:
            begins = [
                orders_of((rows.best - np.float32(nats) * rows.temperature).astype(np.float32))
                for nats in NATS
            ]
            pivots = [low - 1, *begins]
        else:
            pivots = [low + (high - low) * (i + 1) // (PIVOTS + 1) for i in range(PIVOTS)]
        above = [rows.above(pivot, counting) for pivot in pivots]
        rise = (rows.orders - low[:, None]) % 2**32
        fall = (high[:, None] - rows.orders) % 2**32
        bottom, top = low + rise.min(1), high - fall.min(1)
        if first and not counting:
            bound = part * above[0]
        down, up, mass = low.copy(), high.copy(), over.copy()
        for pivot, lies in reversed([*zip(pivots, above)]):
            fits = (lies < bound) | (inclusive & (lies <= bound))
            fits &= (pivot >= down) & (pivot < up)
            up, mass = np.where(fits, pivot, up), np.where(fits, lies, mass)
        for pivot in pivots:
            down = np.where(pivot < up, np.maximum(down, pivot + 1), down)
        down = np.maximum(down, np.minimum(bottom, up))
        up = np.maximum(down, np.minimum(top, up))
        low, high = np.where(open_, down, low), np.where(open_, up, high)
        over = np.where(open_, mass, over)
        first = False
    return high, over, bound


def drawn(rows: Rows, order: Integers, over: Reals, share: Reals) -> Integers:
    """The token of that order on which the rest of the share falls; -1: no token has the order."""
    equal = rows.orders == order[:, None]
    each = np.where(equal, rows.weights, 0).max(1).astype(np.float64)
    covers = equal & (over[:, None] + equal.cumsum(1) * each[:, None] > share[:, None])
    last = VOCAB - 1 - equal[:, ::-1].argmax(1)
    found: Integers = np.where(covers.any(1), covers.argmax(1), last)
    return np.where(equal.any(1), found, -1)


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_pivots_draw_what_a_bisection_does(count: int) -> None:
    differing, tokens = 0, set[int]()
    for seed in range(count // 2_000):
        rows = Rows(2_000, seed)
        old, new = drawn(rows, *bisected(rows)), drawn(rows, *searched(rows))
        assert (old >= 0).all()
        differing += int((old != new).sum())
        tokens |= set(old.tolist())
    assert differing == 0
    assert len(tokens) == VOCAB


def launched(rows: Rows, device: str) -> list[int]:
    """What the kernel draws of them."""
    count = len(rows.logits)
    columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    tables = np.arange(count), np.stack(columns, axis=1).astype(np.float32), rows.points
    there = (torch.from_numpy(each).to(device) for each in (rows.logits, *tables))
    tokens: list[int] = launch_sample(*there).tolist()
    return tokens


@pytest.mark.more
@pytest.mark.parametrize(
    "count", [12, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_the_kernel_draws_what_its_rule_says(device: str, count: int) -> None:
    rows = Rows(count, count)
    ways = {*zip(rows.temperature, rows.top_k > 0, rows.top_p < 1, rows.min_p > 0)}
    assert len(ways) >= 6
    assert launched(rows, device) == drawn(rows, *searched(rows)).tolist()
