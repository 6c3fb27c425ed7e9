"""Changes to a row's logits before the draw: penalties for past tokens, biases, and bans on an
early end.

Owns, for each asking sequence, the tokens and their counts on the device, where sampled tokens are
added unknown to the host. Only the values concerned are read and written: a pass over a whole
vocabulary would cost as much as the choice itself. On a GPU launches cost: a backend may edit all
rows of a step at once (`Ops.slot_edits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from saccade.core.plan import Open
from saccade.core.types import NO_PENALTIES, SamplingParams
from saccade.kernels.device import send

ROOM = 256
"""Tokens that a history has room for beside those that it begins with, at first."""


def list_edits(
    params: SamplingParams, stop_ids: Sequence[int]
) -> tuple[Sequence[tuple[int, float]], Sequence[int]]:
    """Return biases for tokens, and the tokens that are banned while others are due."""
    banned = (*stop_ids, *params.stop_token_ids) if params.tokens_due(0) else ()
    return params.logit_bias, banned


class History:
    """One sequence's tokens, some perhaps twice, and their counts in the answer."""

    def __init__(
        self, tokens: Sequence[int], prompt_length: int, vocab_size: int, device: torch.device
    ) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        values, counts = np.unique(np.array(tokens[prompt_length:], np.int64), return_counts=True)
        if values.size:
            counted = send(counts.astype(np.float32), device)
            self.counts.index_copy_(0, send(values, device), counted)
        seen = np.unique(np.array(tokens, np.int64))
        self._ids = torch.empty(len(seen) + ROOM, dtype=torch.int64, device=device)
        self._ids[: len(seen)].copy_(send(seen, device))
        self._length = len(seen)
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    @property
    def ids(self) -> torch.Tensor:
        return self._ids[: self._length]

    def add_token(self, token: torch.Tensor) -> None:
        """Add the drawn `token` [1]."""
        if self._length == len(self._ids):
            self._ids = torch.cat((self._ids, torch.empty_like(self._ids)))
        self._ids[self._length : self._length + 1].copy_(token)
        self._length += 1
        self.counts.index_add_(0, token, self._one)


@dataclass(frozen=True, slots=True)
class Edit:
    """One sequence's wishes. `bias`: tokens, and additions to their logits."""

    params: SamplingParams
    history: History | None
    bias: tuple[torch.Tensor, torch.Tensor] | None
    bans: torch.Tensor | None

    @classmethod
    def of(
        cls, opened: Open, vocab_size: int, stop_ids: Sequence[int], device: torch.device
    ) -> Edit:
        """Return a sequence's edits, given its prompt and the answer so far."""
        params, history, bias, bans = opened.sampling, None, None, None
        if params.penalties != NO_PENALTIES:
            history = History(opened.tokens, opened.prompt_length, vocab_size, device)
        biases, banned = list_edits(params, stop_ids)
        if biases:
            ids, amounts = zip(*biases)
            added = send(np.array(amounts, np.float32), device)
            bias = send(np.array(ids, np.int64), device), added
        if banned:
            bans = send(np.array(banned, np.int64), device)
        return cls(params, history, bias, bans)

    def edit(self, row: torch.Tensor, count: int, masked: bool, /) -> bool:
        """Change the next token's logits. A ban is lifted where a banned end is the only token
        left.

        In vLLM's order: bans and biases, then penalties on the result. Repetition penalty: Keskar
        et al. 2019 (CTRL), over prompt and output. Presence and frequency: OpenAI's, over the
        output.
        """
        if self.bans is not None and self.params.tokens_due(count):
            banned = row.index_select(0, self.bans)
            row.index_fill_(0, self.bans, -torch.inf)
            if masked:
                row.index_copy_(
                    0, self.bans, torch.where(row.amax() == -torch.inf, banned, -torch.inf)
                )
        if self.bias is not None:
            row.index_add_(0, *self.bias)
        if self.history is not None:
            repetition, presence, frequency = self.params.penalties
            ids = self.history.ids
            values = row.index_select(0, ids)
            harder = torch.where(values > 0, values / repetition, values * repetition)
            counts = self.history.counts.index_select(0, ids)
            # A repeated token gets the same value twice.
            row.index_copy_(0, ids, harder - (presence * (counts > 0) + frequency * counts))
        return masked

    def add_token(self, token: torch.Tensor) -> None:
        if self.history is not None:
            self.history.add_token(token)
