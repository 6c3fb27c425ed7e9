"""The order of sampling is vLLM's: what is drawn has the distribution that its definition gives,
which stands here once more, in float64, without our code. (`tests/kernels/test_sample.py` holds the
kernel beside the sampler that is tested here.)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.plan import Open
from saccade.core.types import SamplingParams
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.sampler import Sampler, uniform
from tests.helpers.breadth import broad

VOCAB, STOP, PROMPT, ANSWER = 40, 6, [1, 2, 3, 3], [5, 5, 8, 2]
DRAWS = 2000
ALONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": ((2, 2.0), (5, 3.0), (7, 1.5), (STOP, 4.0))},
    "min_tokens": {"min_tokens": 9},
}
FOUND = [
    {"temperature": 0.5, "min_p": 0.25, "top_p": 0.7},
    {"temperature": 0.5, "min_p": 0.2, "top_k": 30, "top_p": 0.5},
    {"repetition_penalty": 1.4, "logit_bias": ((2, 5.0), (5, 5.0), (20, 5.0), (21, 5.0))},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "frequency_penalty": -1.0},
]
"""Drawn from another distribution once, and all together."""
WAYS = [
    *ALONE.values(),
    *(first | second for first, second in combinations(ALONE.values(), 2)),
    *FOUND,
]


def row() -> np.ndarray:
    return 0.6 * np.random.default_rng(4).standard_normal(VOCAB)


def cut(shares: np.ndarray, kept: np.ndarray) -> np.ndarray:
    left: np.ndarray = np.where(kept, shares, 0.0)
    return left / left.sum()


def exact(logits: np.ndarray, asked: Mapping[str, Any]) -> np.ndarray:
    """The share of each token: bans, biases, penalties; temperature, min-p, top-k, top-p."""
    x = logits.copy()
    if asked.get("min_tokens", 0) > len(ANSWER):
        x[STOP] = -np.inf
    for token, amount in asked.get("logit_bias", ()):
        x[token] += amount
    for token in set(PROMPT + ANSWER):
        factor = asked.get("repetition_penalty", 1.0)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(ANSWER):
        x[token] -= asked.get("frequency_penalty", 0.0) * ANSWER.count(token)
        x[token] -= asked.get("presence_penalty", 0.0)
    x = x / asked.get("temperature", 1.0)
    shares = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    shares = cut(shares, shares >= asked.get("min_p", 0.0) * shares.max())
    if top_k := asked.get("top_k", 0):
        shares = cut(shares, shares >= np.sort(shares)[-top_k])
    order = np.argsort(-shares)
    before = np.concatenate(([0.0], np.cumsum(shares[order])[:-1]))
    nucleus = np.zeros(VOCAB, bool)
    nucleus[order[before < asked.get("top_p", 1.0)]] = True
    return cut(shares, nucleus)


def drawn(logits: np.ndarray, asked: Mapping[str, Any], points: list[float]) -> np.ndarray:
    """How often each token is drawn at these points."""
    params = SamplingParams(**{"temperature": 1.0, **asked})
    ours = Sampler(VOCAB, len(points), (STOP,), torch.device("cpu"))
    for slot in range(len(points)):
        ours.open(Open(slot, (*PROMPT, *ANSWER), len(PROMPT), (), (), params, ()))
    slots, uniforms = torch.arange(len(points)), torch.tensor(points, dtype=torch.float64)
    at = Draws(range(len(points)), [len(ANSWER)] * len(points), slots, uniforms)
    tokens, _ = ours(torch.from_numpy(logits).float().repeat(len(points), 1), at)
    return np.bincount(tokens.numpy(), minlength=VOCAB)


def improbability(counts: np.ndarray, shares: np.ndarray) -> float:
    """By how many standard deviations Pearson's chi-square is too large (Wilson and Hilferty);
    tokens that fewer than five draws are expected of are one.
    """
    expected = shares * counts.sum()
    rare = expected < 5
    wanted = np.append(expected[~rare], expected[rare].sum())
    found = np.append(counts[~rare], counts[rare].sum())
    there = wanted > 0
    freedom = int(there.sum()) - 1
    if freedom == 0:
        return 0.0
    chi2 = float(((found - wanted)[there] ** 2 / wanted[there]).sum())
    spread = 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def test_the_measure_of_improbability_knows_a_wrong_distribution() -> None:
    shares = exact(row(), {})
    rng = np.random.default_rng(0)
    right = rng.multinomial(DRAWS, shares)
    wrong = rng.multinomial(DRAWS, exact(row(), {"temperature": 0.5}))
    assert improbability(right, shares) < 4 < improbability(wrong, shares)


@pytest.mark.first
@pytest.mark.parametrize("asked", broad(WAYS, keep=[*ALONE.values(), *FOUND]), ids=str)
def test_draws_have_the_distribution_of_the_definition(asked: dict[str, Any]) -> None:
    shares = exact(row(), asked)
    counts = drawn(row(), asked, [uniform(seed, len(ANSWER)) for seed in range(DRAWS)])
    assert counts[shares == 0].sum() == 0, "outside of what may be drawn"
    assert improbability(counts, shares) < 4.5


def test_a_greedy_answer_is_the_best_after_bias_and_penalty() -> None:
    """A bias lifts a token above 0, so that the penalty divides it; the other way round it would
    multiply, and another token would be best.
    """
    logits = np.full(VOCAB, -5.0)
    logits[[2, 20]] = -1.0, 1.5
    params = {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": ((2, 4.0),)}
    assert drawn(logits, params, [0.5]).argmax() == 2, "(4 - 1) / 1.5 against 1.5"
    logits[20] = 2.2
    assert drawn(logits, params, [0.5]).argmax() == 20, "-1 * 1.5 + 4 = 2.5 is the other order"
