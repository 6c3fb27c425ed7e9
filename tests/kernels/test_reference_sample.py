"""A draw on the host is the draw of PyTorch's way, or is left to it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from saccade.core.types import SamplingParams
from saccade.kernels.reference.sample import (
    MAX_SORTED,
    NEUTRAL,
    SampleRow,
    sample_among,
    sample_row,
)
from tests.helpers.processor import HAS_BACKEND

PARAMS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.01, 0.7, 2.0), (0, 1, 40, 5000), (1.0, 0.9, 0.2), (0.0, 1e-4, 0.3)
    )
]


@pytest.fixture(params=["host", "compiled"])
def draw(request: pytest.FixtureRequest) -> SampleRow:
    if request.param == "host":
        return sample_row
    if not HAS_BACKEND:
        pytest.skip("no Numba")
    from saccade.plugins.cpu.sample import sample_row as compiled

    return compiled


def by_sorting_all(logits: torch.Tensor, params: SamplingParams, point: float) -> int:
    vocab = len(logits)
    table = torch.tensor([params.columns])
    limit = torch.tensor([min(params.top_k, vocab) or vocab])
    points = torch.tensor([point], dtype=torch.float64)
    return int(sample_among(vocab, logits[None] / table[:, :1], limit, table, points)[0])


@pytest.mark.parametrize("vocab", [50, 2000, MAX_SORTED + 1000])
def test_what_is_drawn_is_what_a_sort_of_all_tokens_draws(draw: SampleRow, vocab: int) -> None:
    chance, noise = random.Random(vocab), torch.Generator().manual_seed(vocab)
    left = 0
    for params in PARAMS:
        logits = torch.randn(vocab, generator=noise) * chance.choice((1, 3))
        for point in (0.0, chance.random(), chance.random(), 1 - 1e-12):
            found = draw(logits, params.columns, point)
            left += found is None
            assert found in (None, by_sorting_all(logits, params, point))
    assert left < 0.95 * 4 * len(PARAMS)  # flat rows of many tokens, and points at an end


@pytest.mark.parametrize(
    ("logits", "params", "point"),
    [
        ([0.0, 0.0, -5.0], SamplingParams(temperature=1.0), 0.2),  # equals
        ([np.log(0.5), np.log(0.3), np.log(0.2)], SamplingParams(temperature=1.0), 0.5),
        ([0.0, np.log(0.5)], SamplingParams(temperature=1.0, min_p=0.5), 0.2),
        ([np.log(0.5), np.log(0.3), np.log(0.2)], SamplingParams(temperature=1, top_p=0.8), 0.2),
    ],
)
def test_a_draw_at_a_bound_is_left_to_pytorch(
    draw: SampleRow, logits: list[float], params: SamplingParams, point: float
) -> None:
    assert draw(torch.tensor(logits, dtype=torch.float32), params.columns, point) is None


def test_tokens_that_a_mask_forbids_are_never_drawn(draw: SampleRow) -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 50]] = 1.0, 0.0
    for point in np.linspace(0.01, 0.99, 20):
        assert draw(torch.from_numpy(logits), NEUTRAL, float(point)) in (
            3,
            50,
        )
