"""Samples one token from each row of logits, using a few parameters and a uniform random number.

`core.types.SamplingParams.columns` are the parameters. The random number selects a token by the
row's cumulative distribution, in which the most likely token is first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FACTOR, LIMIT, SHARE, FLOOR = range(4)
"""Indices of the parameters. FACTOR: the divisor of logits; 0 is greedy. Filters, in the order in
which they apply: FLOOR (min-p), the minimum probability relative to the best token's; LIMIT
(top-k), 0 for all tokens; SHARE (top-p), the probability mass of the nucleus.
"""
COLUMNS = 4
NEUTRAL = 1.0, 0, 1.0, 0.0
"""Parameters that sample from the unchanged distribution."""
Columns = tuple[float, float, float, float]

ROUNDING = 1e-5
"""Probability mass by which rounding may move the bounds between tokens."""
MAX_SMALL_BATCH = 8
"""Larger batches are sampled faster in one pass over all rows."""
MAX_SORTED = 4096
"""Maximum number of tokens to sort."""
UNLIKELY = 3e-4
"""In a large vocabulary, tokens less likely than this, relative to the best one, are not sorted."""
NUCLEUS_TOKENS = 1024
"""A row is not fully sorted if its sample is among this many top tokens."""
SMALL_LIMIT = 64
"""The same for a small top-k."""

Weights = npt.NDArray[np.float64]
SampleRow = Callable[[torch.Tensor, Columns, float], int | None]
"""A function like `sample_row`."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of allowed tokens, and the rows that they are for."""

    masks: torch.Tensor  # int32 [M, ceil(V / 32)], a bit per allowed token, at least one
    rows: Sequence[int]  # [M]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of D rows."""

    columns: Sequence[Columns]  # by row, on the host
    table: torch.Tensor  # float32 [slots, COLUMNS]: the same on the device, for all slots
    slots: torch.Tensor  # int64 [D]: index of each row in `table`
    points: torch.Tensor  # float64 [D]: uniform numbers
    masks: RowMasks | None = None


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Sample one token per row, int64 [D], from `logits` [D, V] float32, which change in place."""
    return sample_with(sample_row, logits, rows)


def sample_with(sample_row: SampleRow, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Do the same as `sample`, using another implementation of `sample_row` for small batches."""
    if rows.masks is not None:
        from saccade.kernels.reference.mask import mask_logits

        masked = rows.masks.rows
        every = len(masked) == len(logits)
        mask_logits(logits, rows.masks.masks, None if every else torch.tensor(masked))
    sampled = [row for row, columns in enumerate(rows.columns) if columns[FACTOR] > 0.0]
    if not sampled:
        return logits.argmax(dim=-1)
    if len(logits) <= MAX_SMALL_BATCH:
        return _sample_row_by_row(sample_row, logits, rows)
    if len(sampled) == len(logits):
        return _sample_batch(logits, rows, sampled)
    tokens = logits.argmax(dim=-1)
    index = torch.tensor(sampled)
    tokens.index_copy_(0, index, _sample_batch(logits.index_select(0, index), rows, sampled))
    return tokens


def _sample_row_by_row(
    sample_row: SampleRow, logits: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    """Sample row by row on the host. Rows where rounding could matter are sampled by PyTorch."""
    tokens = np.zeros(len(logits), np.int64)
    uncertain = []
    points = rows.points.tolist()
    for row, (columns, line) in enumerate(zip(rows.columns, logits)):
        if columns[FACTOR] == 0.0:
            tokens[row] = line.argmax()
        elif (found := sample_row(line, columns, points[row])) is None:
            uncertain.append(row)
        else:
            tokens[row] = found
    if uncertain:
        left = logits.index_select(0, torch.tensor(uncertain))
        tokens[uncertain] = _sample_batch(left, rows, uncertain).numpy()
    return torch.from_numpy(tokens)


def _sample_batch(logits: torch.Tensor, rows: SamplingRows, sampled: Sequence[int]) -> torch.Tensor:
    """Return tokens for the `sampled` rows, all with a factor above 0.

    The number of top tokens examined for a row depends only on the row's own parameters.
    """
    vocab, every = logits.shape[-1], len(sampled) == len(rows.columns)
    slots, points = (
        each if every else each.index_select(0, torch.tensor(sampled))
        for each in (rows.slots, rows.points)
    )
    columns = rows.table.index_select(0, slots)
    top_k = [int(rows.columns[row][LIMIT]) for row in sampled]
    limits = [min(limit, vocab) if limit > 0 else vocab for limit in top_k]
    scaled, most = logits / columns[:, :1], torch.tensor(limits)
    tokens = torch.empty_like(slots)
    sizes = [_count_best(limit, vocab) for limit in limits]
    for size in sorted({*sizes, vocab}):
        alike = [row for row, other in enumerate(sizes) if other == size]
        if alike:
            index = torch.tensor(alike)
            table = (
                each if len(alike) == len(each) else each.index_select(0, index)
                for each in (scaled, most, columns, points)
            )
            found, certain = sample_among(size, *table)
            tokens.index_copy_(0, index, found)
            for row, sure in zip(alike, certain.tolist()):
                sizes[row] = size if sure else vocab
    return tokens


def _count_best(limit: int, vocab: int) -> int:
    """Return how many top tokens to examine first, if top-k is `limit`."""
    if limit == vocab:
        return min(NUCLEUS_TOKENS, vocab)
    return next((size for size in (SMALL_LIMIT, NUCLEUS_TOKENS) if limit <= size < vocab), vocab)


def sample_among(
    size: int,
    scaled: torch.Tensor,
    limits: torch.Tensor,
    columns: torch.Tensor,
    points: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token [D] for each row of `scaled` [D, V], sampled from its `size` top tokens.

    Also returns whether these include all candidates, [D] bool. Otherwise the token is meaningless.

    limits: [D], the top-k limit, at most V.
    columns: the sampling parameters, float32 [D, COLUMNS].
    points: [D], uniform random numbers.
    """
    vocab = scaled.shape[1]
    _, _, share, floor = columns.split(1, dim=1)
    points, few = points.unsqueeze(1), limits.unsqueeze(1) < vocab
    best, order = torch.topk(scaled, size, dim=-1)
    # Softmax over all tokens is batch-invariant, unlike `sum`, which reduces one row differently.
    of_all = SMALL_LIMIT < size < vocab
    probs = torch.softmax(scaled, -1).gather(1, order) if of_all else torch.softmax(best, -1)
    mass = probs.sum(dim=-1, keepdim=True)
    # min-p is applied first because top-p is relative to the mass that it keeps.
    nucleus = (floor == 0.0) & (mass > share + ROUNDING)
    cut = few | nucleus | (probs[:, -1:] < floor * probs[:, :1])
    whole = ~few & (floor == 0.0) & (share >= 1.0)
    certain = cut | (whole & (points < mass - ROUNDING))
    left = (probs >= floor * probs[:, :1]) & (
        torch.arange(size, device=scaled.device) < limits.unsqueeze(1)
    )
    # For a row without filters, `size` tokens may not include all candidates.
    probs = torch.where(few | (floor > 0.0), renormalise(probs * left), probs)
    keep = left & (probs.cumsum(dim=-1) - probs < share)
    keep[:, 0] = True
    cumulative = (probs * keep).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if size == vocab:
        certain = torch.ones_like(certain)
    else:
        total = torch.where(whole, 1.0, total)
    # The smallest index whose cumulative probability exceeds the point. Because of rounding, the
    # total may be slightly below it.
    found = torch.searchsorted(cumulative, points * total, right=True)
    last = keep.int().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return order.gather(1, torch.minimum(found, last)).squeeze(1), certain.squeeze(1)


def renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def sample_row(logits: torch.Tensor, columns: Columns, point: float) -> int | None:
    """Return a token sampled from one row's logits [V], the same that `sample_among` returns.

    This makes one pass and sorts only the likely tokens. Returns None if too many tokens are
    likely, or if the point is within `ROUNDING` of a bound, so that `sample_among` must decide.
    FACTOR must be above 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _sample_one(logits.numpy(), columns, point)


def _sample_one(logits: npt.NDArray[np.float32], columns: Columns, point: float) -> int | None:
    scaled = logits / np.float32(columns[FACTOR])
    weights = np.exp(scaled - scaled.max())
    order = _sort(scaled, weights)
    if order is None:
        return None
    best = weights[order].astype(np.float64)
    before = np.concatenate(([0.0], best.cumsum()))  # [N + 1]: the mass before each token
    found = _range(weights, best, before, columns)
    if found is None:
        return None
    left, total, slack = found
    target = point * total
    at = int(before[1 : left + 1].searchsorted(target, side="right"))
    if at == left or before[at + 1] - target < slack or (at and target - before[at] < slack):
        return None
    neighbours = scaled[order[max(0, at - 1) : at + 2]]
    if np.count_nonzero(neighbours == scaled[order[at]]) > 1:
        return None  # PyTorch determines the order of ties
    return int(order[at])


def _sort(
    scaled: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64] | None:
    """Return the likely tokens in descending order, or None if there are too many."""
    if len(scaled) <= MAX_SORTED:
        return np.argsort(-scaled)
    likely = np.flatnonzero(weights >= UNLIKELY)
    return likely[np.argsort(-scaled[likely])] if len(likely) <= MAX_SORTED else None


def _range(
    weights: npt.NDArray[np.float32], best: Weights, before: Weights, columns: Columns
) -> tuple[int, float, float] | None:
    """Return the number of candidates, their total probability mass, and its tolerance.

    Returns None if rounding could matter, or if candidates are missing from `best`.
    """
    count, vocab = len(best), len(weights)
    _, limit, share, floor = columns
    limit = int(limit) if 0 < limit < vocab else vocab
    candidates = limit
    if floor > 0.0:
        candidates = int((-best).searchsorted(-floor, side="right"))
        edge = best[max(0, candidates - 1) : candidates + 1]
        if (abs(edge - floor) < ROUNDING * floor).any() or candidates == count < vocab:
            return None
        candidates = min(candidates, limit)
    if candidates == vocab > count:
        total = float(weights.sum(dtype=np.float64))
    elif candidates > count:
        return None
    else:
        total = float(before[candidates])
    left, slack = min(candidates, count), ROUNDING * total
    if share < 1.0:
        bound = share * total
        kept = int(before[:left].searchsorted(bound))
        edge = before[max(1, kept - 1) : kept + 1]
        if (abs(edge - bound) < slack).any() or kept == left < candidates:
            return None
        left = max(1, kept)
        total = float(before[left])
    return left, total, slack
