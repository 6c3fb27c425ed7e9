"""Changes to a row's logits before the draw: penalties for past tokens, biases, and bans on an
early end.

Owns, for each asking sequence, the tokens and their counts on the device, where drawn tokens are
added unknown to the host. On a CPU (`Edit`) only the values concerned are read and written: a pass
over a whole vocabulary would cost as much as the choice itself. On a GPU (`SlotEdits`) launches
cost: one kernel edits all rows in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from saccade.core.plan import Open
from saccade.core.types import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from saccade.nn.transfer import send
from saccade.runtime.row_parts import Draws

if TYPE_CHECKING:
    from saccade.kernels.triton.edits import EditTables

NEUTRAL = 1.0, 0.0, 0.0
"""Repetition, presence and frequency penalties that change nothing."""
NOTHING = -1, 0, 0
"""The facts of a slot without edits: no line of counts, no listed tokens, no bans left."""
ROOM = 256
"""Tokens that a history has room for beside those that it begins with, at first."""


def penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Return the repetition, presence and frequency penalties."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


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
        if penalties(params) != NEUTRAL:
            history = History(opened.tokens, opened.prompt_length, vocab_size, device)
        if params.logit_bias:
            ids, amounts = zip(*params.logit_bias)
            added = send(np.array(amounts, np.float32), device)
            bias = send(np.array(ids, np.int64), device), added
        if params.min_tokens:
            bans = send(np.array((*stop_ids, *params.stop_token_ids), np.int64), device)
        return cls(params, history, bias, bans)

    def edit(self, row: torch.Tensor, count: int, masked: bool, /) -> bool:
        """Change the next token's logits. A ban is lifted where a banned end is the only token
        left.

        In vLLM's order: bans and biases, then penalties on the result. Repetition penalty: Keskar
        et al. 2019 (CTRL), over prompt and output. Presence and frequency: OpenAI's, over the
        output.
        """
        if self.bans is not None and count < self.params.min_tokens:
            banned = row.index_select(0, self.bans)
            row.index_fill_(0, self.bans, -torch.inf)
            if masked:
                row.index_copy_(
                    0, self.bans, torch.where(row.amax() == -torch.inf, banned, -torch.inf)
                )
        if self.bias is not None:
            row.index_add_(0, *self.bias)
        if self.history is not None:
            repetition, presence, frequency = penalties(self.params)
            ids = self.history.ids
            values = row.index_select(0, ids)
            harder = torch.where(values > 0, values / repetition, values * repetition)
            counts = self.history.counts.index_select(0, ids)
            # A token that stands there twice gets the same value twice.
            row.index_copy_(0, ids, harder - (presence * (counts > 0) + frequency * counts))
        return masked

    def add_token(self, token: torch.Tensor) -> None:
        if self.history is not None:
            self.history.add_token(token)


class SlotEdits:
    """Edits all rows in a step with one kernel, which reads the slots' wishes on the device.

    Works as `Edit` does. Each slot has a line of counts for the whole vocabulary, at a fixed
    address, so that a graph may read the line. Only this class writes `tables`.
    """

    def __init__(
        self, vocab_size: int, slots: int, stop_ids: Sequence[int], device: torch.device
    ) -> None:
        # Imported where there is a GPU: elsewhere Triton need not be installed.
        from saccade.kernels.triton.edits import EditTables

        ends = tuple(dict.fromkeys(stop_ids))
        width = MAX_BIASED_TOKENS + MAX_STOP_TOKENS + len(ends)
        width += -width % 16
        self._stop_ids = ends
        self._device = device
        facts = np.full((slots, 3), NOTHING, np.int32)
        self.tables: EditTables = EditTables(
            facts=send(facts, device),
            weights=torch.ones((slots, 3), dtype=torch.float32, device=device),
            entries=torch.zeros((slots, width), dtype=torch.int32, device=device),
            amounts=torch.zeros((slots, width), dtype=torch.float32, device=device),
            counts=torch.zeros((slots, vocab_size), dtype=torch.int32, device=device),
        )

    def open(self, opened: Open) -> None:
        """Open a slot for a sequence, with its prompt and the answer so far."""
        slot, params, tokens = opened.slot, opened.sampling, opened.tokens
        listed = self._list(slot, params)
        line = -1
        if penalties(params) != NEUTRAL:
            weights = np.array(penalties(params), np.float32)
            self.tables.weights[slot].copy_(send(weights, self._device))
            line = slot
            self._fill(line, tokens, opened.prompt_length, listed)
        left = max(0, params.min_tokens - (len(tokens) - opened.prompt_length))
        self._send_facts(slot, (line, len(listed), min(left, np.iinfo(np.int32).max)))

    def close(self, slot: int) -> None:
        """Leave the kernel without work in the slot, whoever enters it."""
        self._send_facts(slot, NOTHING)

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool) -> bool:
        from saccade.kernels.triton.edits import launch_edit

        launch_edit(logits, draws.slots, self.tables, masked)
        return masked

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        from saccade.kernels.triton.edits import launch_count

        launch_count(draws.slots, self.tables, tokens)

    def _send_facts(self, slot: int, facts: tuple[int, int, int]) -> None:
        self.tables.facts[slot].copy_(send(np.array(facts, np.int32), self._device))

    def _list(self, slot: int, params: SamplingParams) -> list[int]:
        """Write the biased and banned tokens into the slot's list, and return them, each once."""
        from saccade.kernels.triton.edits import BANNED

        added = dict[int, float]()
        for token, amount in params.logit_bias:
            added[token] = added.get(token, 0.0) + amount
        banned = {*self._stop_ids, *params.stop_token_ids} if params.min_tokens else set[int]()
        listed = [*added, *(banned - added.keys())]
        if listed:
            entries = np.array(listed, np.int32)
            entries |= np.array([token in banned for token in listed]) * np.int32(BANNED.value)
            amounts = np.array([added.get(token, 0.0) for token in listed], np.float32)
            self.tables.entries[slot, : len(listed)].copy_(send(entries, self._device))
            self.tables.amounts[slot, : len(listed)].copy_(send(amounts, self._device))
        return listed

    def _fill(
        self, line: int, tokens: Sequence[int], prompt_length: int, listed: Sequence[int]
    ) -> None:
        """Write the line's numbers for a prompt and the answer so far."""
        from saccade.kernels.triton.edits import LISTED, SEEN

        ids = np.array((*tokens, *listed), np.int64)
        unique, places = np.unique(ids, return_inverse=True)
        state = np.bincount(places[prompt_length : len(tokens)], minlength=len(unique))
        numbers = state.astype(np.int32)
        numbers[places[: len(tokens)]] |= SEEN.value
        numbers[places[len(tokens) :]] |= LISTED.value
        counts = self.tables.counts[line].zero_()
        counts.index_copy_(0, send(unique, self._device), send(numbers, self._device))
