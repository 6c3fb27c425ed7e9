"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and log-probabilities.

A row's draw depends on its own logits, its seed and how many tokens it has drawn, never on the rest
of the batch: one uniform number per token comes from a counter-based hash of (seed, count), and
picks from the row's own cumulative distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.types import SamplingParams, TokenLogprobs

_MASK = (1 << 64) - 1


def uniform(seed: int, count: int) -> float:
    """A number in [0, 1) that (seed, count) decide.

    Two rounds of splitmix64 (Steele, Lea, Flood 2014), 53 bits kept.
    """
    z = seed & _MASK
    for word in (count, 0x5ACCADE):
        z = (z + word * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


class SamplerState:
    """What sampling remembers of one sequence."""

    def __init__(self, params: SamplingParams, tokens: Sequence[int], prompt_length: int) -> None:
        self.params = params
        self.count = len(tokens) - prompt_length
        penalises = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._prompt = set(tokens[:prompt_length]) if penalises else set()
        self._output = Counter(tokens[prompt_length:]) if penalises else Counter()
        self.penalises = penalises

    def append(self, token: int) -> None:
        self.count += 1
        if self.penalises:
            self._output[token] += 1

    def edit(self, logits: torch.Tensor, stop_ids: Sequence[int]) -> None:
        """Apply penalties, bias and the ban on early stops to one row [V] of logits, in place.

        Repetition penalty: Keskar et al. 2019 (CTRL), over prompt and output. Presence and
        frequency: OpenAI's, over the output.
        """
        params = self.params
        if self.penalises:
            self._penalise(logits)
        if params.logit_bias:
            ids, bias = zip(*params.logit_bias)
            logits[list(ids)] += torch.tensor(bias, device=logits.device)
        if self.count < params.min_tokens:
            logits[[*stop_ids, *params.stop_token_ids]] = -torch.inf

    def _penalise(self, logits: torch.Tensor) -> None:
        params, device = self.params, logits.device
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt | self._output.keys()), device=device)
            values = logits[seen]
            logits[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if self._output and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(list(self._output.keys()), device=device)
            counts = torch.tensor(list(self._output.values()), device=device, dtype=logits.dtype)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts

    @property
    def edits(self) -> bool:
        return self.penalises or bool(self.params.logit_bias) or self.count < self.params.min_tokens


def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], stop_ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
    """Draw one token per row of `logits` [R, V] float32 (changed in place).

    `stop_ids`: the model's own end tokens.
    """
    wants = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    raw = torch.log_softmax(logits[wants], dim=-1) if wants else None  # [W, V], before any edit
    for row, state in enumerate(states):
        if state.edits:
            state.edit(logits[row], stop_ids)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, state in enumerate(states) if state.params.temperature > 0.0]
    if drawn:
        whole = len(drawn) == len(states)
        for row, token in zip(
            drawn, _draw(logits if whole else logits[drawn], [states[row] for row in drawn])
        ):
            tokens[row] = token
    reports: list[TokenLogprobs | None] = [None] * len(states)
    if raw is not None:
        for index, row in enumerate(wants):
            reports[row] = _report(raw[index], tokens[row], states[row].params.logprobs or 0)
    return tuple(tokens), tuple(reports)


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Sample rows [D, V] whose temperature is above 0."""
    params = [state.params for state in states]
    vocab = logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:  # [D, 1]
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    limits = [min(p.top_k or vocab, vocab) for p in params]
    # Best first. A full sort of a large vocabulary is the dear case; top-k for every row makes it
    # cheap.
    best, order = torch.topk(
        logits / column([p.temperature for p in params]), max(limits), dim=-1
    )  # [D, K]
    probs = torch.softmax(best, dim=-1)
    rank = torch.arange(probs.shape[1], device=logits.device)
    keep = rank < torch.tensor(limits, device=logits.device).unsqueeze(1)
    probs = _renormalise(probs * keep)
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    keep = (probs.cumsum(dim=-1) - probs < top_p) & (probs >= min_p * probs[:, :1])
    keep[:, 0] = True
    cumulative = _renormalise(probs * keep).double().cumsum(dim=-1)
    draws = np.array([[uniform(state.params.seed, state.count)] for state in states])
    # The smallest index whose cumulative probability exceeds the draw; rounding may leave the total
    # just below it.
    points = torch.from_numpy(draws).to(logits.device) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, points, right=True).clamp_(max=probs.shape[1] - 1)
    index = torch.minimum(index, keep.int().cumsum(dim=-1).argmax(dim=-1, keepdim=True))
    return order.gather(1, index).squeeze(1).tolist()


def _renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def _report(logprobs: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities [V] of one row, for the client."""
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = torch.topk(logprobs, min(top, logprobs.shape[0]))
        best = tuple(zip(ids.tolist(), values.tolist()))
    return TokenLogprobs(token=token, logprob=float(logprobs[token]), top=best)
