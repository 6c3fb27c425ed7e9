"""Draws of a few rows on the host: one pass over a row, and a sort of its likely tokens alone.

Owns no state. Finds the token that `sampler.draw_among` finds, or says that rounding could decide:
both round, each in its own way, so a draw within `ROUNDING` of a bound is left to PyTorch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

ROUNDING = 1e-5
"""Probability that rounding may move from one side of a bound to the other."""
FEW_ROWS = 8
"""More rows are drawn faster in one pass over all."""
MOST_SORTED = 4096
"""Tokens that are sorted, at most."""
UNLIKELY = 3e-4
"""Tokens less likely than so much of the best one stay unsorted in a large vocabulary."""

Weights = npt.NDArray[np.float64]


class DrawParams(Protocol):
    """How a row is drawn, as `SamplingParams` says."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...


def draw_few(logits: torch.Tensor, params: DrawParams, point: float) -> int | None:
    """Draw a token by one row's logits [V] and a uniform number.

    Returns `None` if rounding could decide, or too many tokens are likely. Temperature is above 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _draw(logits.numpy(), params, point)


def _draw(logits: npt.NDArray[np.float32], params: DrawParams, point: float) -> int | None:
    scaled = logits / np.float32(params.temperature)
    weights = np.exp(scaled - scaled.max())
    order = _sort(scaled, weights)
    if order is None:
        return None
    best = weights[order].astype(np.float64)
    before = np.concatenate(([0.0], best.cumsum()))  # [N + 1]: the mass before each token
    found = _range(weights, best, before, params)
    if found is None:
        return None
    left, total, slack = found
    target = point * total
    at = int(before[1 : left + 1].searchsorted(target, side="right"))
    if at == left or before[at + 1] - target < slack or (at and target - before[at] < slack):
        return None
    beside = scaled[order[max(0, at - 1) : at + 2]]
    if np.count_nonzero(beside == scaled[order[at]]) > 1:
        return None  # which of equals comes first is PyTorch's choice
    return int(order[at])


def _sort(
    scaled: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64] | None:
    """Return the likely tokens, the best first, or `None` if there are too many."""
    if len(scaled) <= MOST_SORTED:
        return np.argsort(-scaled)
    likely = np.flatnonzero(weights >= UNLIKELY)
    return likely[np.argsort(-scaled[likely])] if len(likely) <= MOST_SORTED else None


def _range(
    weights: npt.NDArray[np.float32], best: Weights, before: Weights, params: DrawParams
) -> tuple[int, float, float] | None:
    """Return how many of the best tokens are open to the draw, their mass, and what is near.

    Returns `None` if rounding could decide, or it takes tokens that are not among the best. The
    mass is of all tokens if all are open.
    """
    count, vocab = len(best), len(weights)
    limit = params.top_k if 0 < params.top_k < vocab else vocab
    open_to = limit
    if params.min_p > 0.0:
        open_to = int((-best).searchsorted(-params.min_p, side="right"))
        edge = best[max(0, open_to - 1) : open_to + 1]
        if (abs(edge - params.min_p) < ROUNDING * params.min_p).any() or open_to == count < vocab:
            return None
        open_to = min(open_to, limit)
    if open_to == vocab > count:
        total = float(weights.sum(dtype=np.float64))
    elif open_to > count:
        return None
    else:
        total = float(before[open_to])
    left, slack = min(open_to, count), ROUNDING * total
    if params.top_p < 1.0:
        bound = params.top_p * total
        kept = int(before[:left].searchsorted(bound))
        edge = before[max(1, kept - 1) : kept + 1]
        if (abs(edge - bound) < slack).any() or kept == left < open_to:
            return None
        left = max(1, kept)
        total = float(before[left])
    return left, total, slack
