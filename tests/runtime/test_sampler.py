"""Sampling: what each dial does, and that a draw depends on nothing but its own row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.plan import Open, StepResult
from saccade.core.types import SamplingParams, TokenLogprobs
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.edits import Edit
from saccade.runtime.sampling.sampler import Sampler, uniform

VOCAB = 50
EARLIER = [0.035919851159479155, 0.1928263447275923, 0.6179994333376583, 0.7506478699509643]
"""Drawn by the first release."""


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


class Row:
    """A sequence: its parameters, its prompt and what it has drawn."""

    def __init__(self, params: SamplingParams, tokens: list[int], prompt_length: int) -> None:
        self.params, self.tokens, self.prompt_length = params, tokens, prompt_length


def opened(slot: int, row: Row) -> Open:
    return Open(slot, tuple(row.tokens), row.prompt_length, (), (), row.params, ())


def sampler(rows: Sequence[Row], stop_ids: tuple[int, ...] = (), vocab: int = VOCAB) -> Sampler:
    """Each row in a slot of its own, backwards."""
    ours = Sampler(vocab, len(rows), stop_ids, torch.device("cpu"))
    for slot, row in zip(reversed(range(len(rows))), rows):
        ours.open(opened(slot, row))
    return ours


def draws(rows: Sequence[Row], more: int = 0) -> Draws:
    """The rows in order, after `more` further tokens each."""
    slots = list(reversed(range(len(rows))))
    counts = [len(row.tokens) - row.prompt_length + more for row in rows]
    points = [uniform(row.params.seed, count) for row, count in zip(rows, counts)]
    return Draws(slots, counts, torch.tensor(slots), torch.tensor(points, dtype=torch.float64))


Reports = tuple[TokenLogprobs | None, ...]


def sample(
    logits: torch.Tensor, rows: Sequence[Row], stop_ids: tuple[int, ...] = ()
) -> tuple[list[int], Reports]:
    tokens, report = sampler(rows, stop_ids, logits.shape[1])(logits, draws(rows))
    drawn = tokens.tolist()
    result = StepResult(0, tuple(drawn))
    told = dict(report.add_to(result, report.tensors).logprobs) if report else {}
    return drawn, tuple(map(told.get, range(len(rows))))


def draw(row: torch.Tensor, count: int = 0, **params: Any) -> int:
    state = Row(SamplingParams(**params), [1, 2, 3] + [4] * count, 3)
    return sample(row.clone().view(1, -1), [state])[0][0]


def frequencies(row: torch.Tensor, n: int = 4000, **params: Any) -> np.ndarray:
    """Share of each token in n draws that differ by seed alone."""
    states = [Row(SamplingParams(seed=seed, **params), [1], 1) for seed in range(n)]
    tokens, _ = sample(row.expand(n, -1).clone(), states)
    return np.bincount(tokens, minlength=VOCAB) / n


def test_uniform_numbers_are_uniform_and_reproducible() -> None:
    values = np.array([uniform(seed, count) for seed in range(200) for count in range(50)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi2 = ((counts - 500) ** 2 / 500).sum()
    assert chi2 < 43.8, "19 degrees of freedom, p = 0.001"
    assert uniform(7, 3) == uniform(7, 3) != uniform(7, 4)


def test_uniform_numbers_stay_what_they_were() -> None:
    """A seed's answers outlive the release that gave them."""
    asked = ((0, 0), (7, 3), (7, 4), ((1 << 64) - 1, 1000))
    assert [uniform(seed, count) for seed, count in asked] == EARLIER


def test_greedy_takes_the_best() -> None:
    rows = logits(8)
    states = [Row(SamplingParams(), [1], 1) for _ in range(8)]
    assert list(sample(rows.clone(), states)[0]) == rows.argmax(-1).tolist()


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


def test_a_top_k_of_any_size_is_no_limit() -> None:
    row = logits()[0]
    for top_k in (VOCAB, 2**31, 2**63 - 1):
        for seed in range(20):
            free = draw(row, temperature=1.0, seed=seed)
            assert draw(row, temperature=1.0, seed=seed, top_k=top_k) == free


def test_top_p_never_cuts_everything() -> None:
    assert draw(logits()[0], temperature=1.0, top_p=1e-9) == int(logits()[0].argmax())


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3}]
)
def test_a_draw_does_not_depend_on_its_neighbours(params: dict[str, Any]) -> None:
    rows = logits(6)
    others: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 40},
        {"temperature": 0.3},
        {"temperature": 1.0, "logit_bias": ((3, 5.0),)},
    ]
    for seed in range(20):
        alone = draw(rows[2], temperature=0.9, seed=seed, **params)
        states = [
            Row(SamplingParams(seed=seed + i, **other), [1], 1) for i, other in enumerate(others)
        ]
        states.insert(2, Row(SamplingParams(temperature=0.9, seed=seed, **params), [1, 2, 3], 3))
        assert sample(rows[:5].clone(), states)[0][2] == alone


def test_of_equal_logits_the_same_is_drawn_alone_and_beside_rows_that_need_all_tokens() -> None:
    """As in bfloat16: many tokens are equally likely, and other ways to sort order them
    otherwise.
    """
    vocab, count = 5000, 24
    rows = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 2
    rows = rows.bfloat16().float()
    kinds: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_k": 900}, {"top_k": 2000})
    states = [
        Row(SamplingParams(temperature=1.0, seed=n, **kinds[n % len(kinds)]), [1], 1)
        for n in range(count)
    ]
    alone = [sample(rows[n : n + 1].clone(), states[n : n + 1])[0][0] for n in range(count)]
    assert sample(rows.clone(), states)[0] == alone


def test_a_draw_is_the_same_after_a_preemption() -> None:
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, repetition_penalty=1.2)
    row = Row(params, [1, 2], 2)
    lived = sampler([row])
    tokens = [1, 2]
    for count in range(12):
        reborn = sample(logits(seed=count), [Row(params, list(tokens), 2)])[0][0]
        tokens.append(int(lived(logits(seed=count), draws([row], count))[0]))
        assert tokens[-1] == reborn


def test_penalties_follow_their_formulas() -> None:
    row = logits()[0]
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    edit = Edit.of(opened(3, Row(params, [1, 2, 9], 2)), VOCAB, (), torch.device("cpu"))
    edit.add_token(torch.tensor([9]))
    got = row.clone()
    edit.edit(got, 2, False)
    want = row.clone()
    for token in (1, 2, 9):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    want[9] -= 0.3 + 2 * 0.2
    torch.testing.assert_close(got, want)


def test_a_slot_forgets_whoever_had_it_before() -> None:
    row = logits()[0]
    ours = Sampler(VOCAB, 1, (), torch.device("cpu"))
    for params in (
        SamplingParams(logit_bias=((7, 100.0),), frequency_penalty=1.0),
        SamplingParams(min_tokens=1, stop_token_ids=(8,)),
        SamplingParams(),
    ):
        state = Row(params, [1], 1)
        ours.open(opened(0, state))
        fresh = sample(row.clone().view(1, -1), [state])[0][0]
        assert int(ours(row.clone().view(1, -1), draws([state]))[0]) == fresh
        ours.close(0)


def test_bias_moves_a_token_and_min_tokens_forbids_the_end() -> None:
    row = logits()[0]
    best = int(row.argmax())
    worst = int(row.argmin())
    assert draw(row, logit_bias=((worst, 100.0),)) == worst
    state = Row(SamplingParams(min_tokens=2, stop_token_ids=(best,)), [1], 1)
    ours = sampler([state], (3,))
    tokens = [int(ours(row.clone().view(1, -1), draws([state], n))[0]) for n in range(3)]
    assert best not in tokens[:2] and tokens[2] == best


def test_only_what_a_mask_allows_is_drawn() -> None:
    rows = logits(3)
    states = [
        Row(SamplingParams(), [1], 1),
        Row(SamplingParams(temperature=1.0, logit_bias=((4, 100.0),)), [1], 1),
        Row(SamplingParams(), [1], 1),
    ]
    allowed = [{0, 31, 32, 49}, {33, 40}, set(range(VOCAB))]
    masks = torch.zeros((3, 2), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= 1 << token % 32
    signed = torch.where(masks >= 1 << 31, masks - (1 << 32), masks).int()
    drawn, _ = sampler(states)(rows.clone(), draws(states), signed)
    found = drawn.tolist()
    assert found[0] == max(allowed[0], key=lambda token: float(rows[0, token]))
    assert found[1] in allowed[1]
    assert found[2] == int(rows[2].argmax())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.001},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 3000},
        {"min_p": 0.2},
        {"temperature": 2.0},
        {"temperature": 2.0, "top_p": 0.999},
    ],
    ids=str,
)
def test_a_large_vocabulary_is_not_sorted_and_draws_are_as_if_it_were(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaked rows, as of a model, and flat ones, for which the best few are not enough."""
    vocab, count = 5000, 64
    rows = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 4
    states = [
        Row(SamplingParams(**{"temperature": 0.8, "seed": n, **params}), [1], 1)  # type: ignore[arg-type]
        for n in range(count)
    ]
    short, _ = sample(rows.clone(), states)
    monkeypatch.setattr("saccade.kernels.reference.sample.NUCLEUS_TOKENS", vocab)
    sorted_, _ = sample(rows.clone(), states)
    assert short == sorted_


def test_logprobs_are_of_the_models_own_distribution() -> None:
    row = logits()[0]
    state = Row(SamplingParams(logprobs=3, temperature=2.0, logit_bias=((0, 50.0),)), [1], 1)
    (token,), (report,) = sample(row.clone().view(1, -1), [state])
    assert token == 0
    assert report is not None
    want = torch.log_softmax(row, -1)
    assert report.logprob == pytest.approx(float(want[0]), abs=1e-6)
    assert [token for token, _ in report.top] == want.topk(3).indices.tolist()
