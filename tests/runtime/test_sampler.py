"""Sampling: what each dial does, and that a draw depends on nothing but its own row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.core.types import SamplingParams
from saccade.runtime.sampler import SamplerState, sample, uniform

VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(row: torch.Tensor, count: int = 0, **params: object) -> int:
    state = SamplerState(SamplingParams(**params), [1, 2, 3] + [4] * count, 3)  # type: ignore[arg-type]
    return sample(row.clone().view(1, -1), [state], ())[0][0]


def frequencies(row: torch.Tensor, n: int = 4000, **params: object) -> np.ndarray:
    """Share of each token in n draws that differ by seed alone."""
    states = [SamplerState(SamplingParams(seed=seed, **params), [1], 1) for seed in range(n)]  # type: ignore[arg-type]
    tokens, _ = sample(row.expand(n, -1).clone(), states, ())
    return np.bincount(tokens, minlength=VOCAB) / n


def test_uniform_numbers_are_uniform_and_reproducible() -> None:
    values = np.array([uniform(seed, count) for seed in range(200) for count in range(50)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi2 = ((counts - 500) ** 2 / 500).sum()
    assert chi2 < 43.8, "19 degrees of freedom, p = 0.001"
    assert uniform(7, 3) == uniform(7, 3) != uniform(7, 4)


def test_greedy_takes_the_best() -> None:
    rows = logits(8)
    states = [SamplerState(SamplingParams(), [1], 1) for _ in range(8)]
    assert list(sample(rows.clone(), states, ())[0]) == rows.argmax(-1).tolist()


def test_temperature_one_follows_the_models_distribution() -> None:
    row = logits()[0]
    np.testing.assert_allclose(
        frequencies(row, temperature=1.0), torch.softmax(row, -1).numpy(), atol=0.03
    )


def test_top_k_and_top_p_and_min_p_cut_where_they_say() -> None:
    row = logits()[0]
    probs, order = torch.softmax(row, -1).sort(descending=True)
    assert set(np.flatnonzero(frequencies(row, temperature=1.0, top_k=3))) == set(
        order[:3].tolist()
    )
    kept = int((probs.cumsum(0) - probs < 0.6).sum())
    assert set(np.flatnonzero(frequencies(row, temperature=1.0, top_p=0.6))) == set(
        order[:kept].tolist()
    )
    kept = int((probs >= 0.4 * probs[0]).sum())
    assert set(np.flatnonzero(frequencies(row, temperature=1.0, min_p=0.4))) == set(
        order[:kept].tolist()
    )


def test_top_p_never_cuts_everything() -> None:
    assert draw(logits()[0], temperature=1.0, top_p=1e-9) == int(logits()[0].argmax())


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3}]
)
def test_a_draw_does_not_depend_on_its_neighbours(params: dict[str, float]) -> None:
    rows = logits(6)
    others = [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 40},
        {"temperature": 0.3},
        {"temperature": 1.0, "logit_bias": ((3, 5.0),)},
    ]
    for seed in range(20):
        alone = draw(rows[2], temperature=0.9, seed=seed, **params)
        states = [
            SamplerState(SamplingParams(seed=seed + i, **other), [1], 1)
            for i, other in enumerate(others)
        ]  # type: ignore[arg-type]
        states.insert(
            2, SamplerState(SamplingParams(temperature=0.9, seed=seed, **params), [1, 2, 3], 3)
        )  # type: ignore[arg-type]
        assert sample(rows[:5].clone(), states, ())[0][2] == alone


def test_a_draw_is_the_same_after_a_preemption() -> None:
    row = logits()[0]
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5)
    lived = SamplerState(params, [1, 2], 2)
    for token in (7, 7, 9):
        lived.append(token)
    reborn = SamplerState(params, [1, 2, 7, 7, 9], 2)
    assert sample(row.clone().view(1, -1), [lived], ()) == sample(
        row.clone().view(1, -1), [reborn], ()
    )


def test_penalties_follow_their_formulas() -> None:
    row = logits()[0]
    state = SamplerState(
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
        [1, 2, 9, 9],
        2,
    )
    got = row.clone()
    state.edit(got, ())
    want = row.clone()
    for token in (1, 2, 9):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    want[9] -= 0.3 + 2 * 0.2
    torch.testing.assert_close(got, want)


def test_bias_moves_a_token_and_min_tokens_forbids_the_end() -> None:
    row = logits()[0]
    best = int(row.argmax())
    worst = int(row.argmin())
    assert draw(row, logit_bias=((worst, 100.0),)) == worst
    state = SamplerState(SamplingParams(min_tokens=2, stop_token_ids=(best,)), [1], 1)
    first = sample(row.clone().view(1, -1), [state], (3,))[0][0]
    assert first != best
    state.append(first)
    state.append(first)
    assert sample(row.clone().view(1, -1), [state], (3,))[0][0] == best


def test_logprobs_are_of_the_models_own_distribution() -> None:
    row = logits()[0]
    state = SamplerState(
        SamplingParams(logprobs=3, temperature=2.0, logit_bias=((0, 50.0),)), [1], 1
    )
    (token,), (report,) = sample(row.clone().view(1, -1), [state], ())
    assert token == 0
    assert report is not None
    want = torch.log_softmax(row, -1)
    assert report.logprob == pytest.approx(float(want[0]), abs=1e-6)
    assert [token for token, _ in report.top] == want.topk(3).indices.tolist()
