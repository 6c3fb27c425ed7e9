"""Changes one sequence's logits before sampling. It applies penalties for tokens that occurred
before, logit biases, and bans of end tokens before the minimum length.

Each sequence's tokens and their counts are stored on the device, where sampled tokens are added
without waiting for the host. Only the affected logits are read and written, because a pass over the
entire vocabulary would take as long as sampling. On a GPU, where each launch has a cost, a backend
can edit all rows of a step at once instead (`Ops.slot_edits`).
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
"""The initial number of free entries in a `History`."""


def list_edits(
    params: SamplingParams, stop_ids: Sequence[int]
) -> tuple[Sequence[tuple[int, float]], Sequence[int]]:
    """Return the logit biases, and the tokens that are banned below the minimum length.

    A bias is (token, bias).
    """
    banned = (*stop_ids, *params.stop_token_ids) if params.tokens_due(0) else ()
    return params.logit_bias, banned


class History:
    """Stores the tokens of one sequence, and how often each occurs in the output.

    The stored tokens may contain duplicates.
    """

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
        """Add the sampled `token` [1]."""
        if self._length == len(self._ids):
            self._ids = torch.cat((self._ids, torch.empty_like(self._ids)))
        self._ids[self._length : self._length + 1].copy_(token)
        self._length += 1
        self.counts.index_add_(0, token, self._one)


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes the logits of one sequence as its sampling parameters require."""

    params: SamplingParams
    history: History | None  # `None` without penalties
    bias: tuple[torch.Tensor, torch.Tensor] | None  # (token ids, values to add)
    bans: torch.Tensor | None  # token ids

    @classmethod
    def of(
        cls, opened: Open, vocab_size: int, stop_ids: Sequence[int], device: torch.device
    ) -> Edit:
        """Return the edits for the sequence in `opened`, which has its prompt and the output so
        far.
        """
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
        """Apply bans, biases and penalties to the next token's logits, in place.

        If all other tokens are already banned, the bans are not applied. The order is the same as
        in vLLM: first bans and biases, then penalties. The repetition penalty (Keskar et al. 2019,
        CTRL) applies to tokens of the prompt and the output. OpenAI's presence and frequency
        penalties count tokens of the output.

        row: the logits, [vocab_size].
        count: how many tokens were sampled before.
        masked: True if some logits may already be -inf. Returned unchanged, because bans of end
            tokens alone cannot forbid all tokens.
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
            # Duplicate ids are harmless, since they write the same value.
            row.index_copy_(0, ids, harder - (presence * (counts > 0) + frequency * counts))
        return masked

    def add_token(self, token: torch.Tensor) -> None:
        if self.history is not None:
            self.history.add_token(token)
