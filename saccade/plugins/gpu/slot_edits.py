"""Applies penalties for past tokens, logit biases, and bans on an early end, for all requests of a
step.

Each slot's options and token counts are on the device, so sampled tokens are counted without a host
synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.plan import Open
from saccade.core.types import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, NO_PENALTIES, SamplingParams
from saccade.kernels.device import send
from saccade.plugins.gpu.triton.edits import (
    BANNED,
    LISTED,
    SEEN,
    EditTables,
    launch_count,
    launch_edit,
)
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.edits import list_edits

NOTHING = -1, 0, 0
"""The entry of a slot without edits: no row of counts, no listed tokens, and no minimum length."""


class SlotEdits:
    """Edits the logits of all requests with one kernel, which reads the slots' options on the
    device.

    Implements `runtime.row_parts.SamplePart`, with the same edits as `runtime.sampling.edits.Edit`.
    Each slot has a row of counts for the whole vocabulary at a fixed address, which CUDA graphs can
    read. Only this class writes to `tables`.
    """

    def __init__(
        self, vocab_size: int, slots: int, stop_ids: Sequence[int], device: torch.device
    ) -> None:
        ends = tuple(dict.fromkeys(stop_ids))
        width = MAX_BIASED_TOKENS + MAX_STOP_TOKENS + len(ends)
        width += -width % 16
        self._stop_ids = ends
        self._device = device
        facts = np.full((slots, 3), NOTHING, np.int32)
        self.tables = EditTables(
            facts=send(facts, device),
            weights=torch.ones((slots, 3), dtype=torch.float32, device=device),
            entries=torch.zeros((slots, width), dtype=torch.int32, device=device),
            amounts=torch.zeros((slots, width), dtype=torch.float32, device=device),
            counts=torch.zeros((slots, vocab_size), dtype=torch.int32, device=device),
        )

    def open(self, opened: Open) -> None:
        """Set up a slot for a sequence, with its prompt and the tokens generated so far."""
        slot, params, tokens = opened.slot, opened.sampling, opened.tokens
        listed = self._list(slot, params)
        line = -1
        if params.penalties != NO_PENALTIES:
            weights = np.array(params.penalties, np.float32)
            self.tables.weights[slot].copy_(send(weights, self._device))
            line = slot
            self._fill(line, tokens, opened.prompt_length, listed)
        left = params.tokens_due(len(tokens) - opened.prompt_length)
        self._send_facts(slot, (line, len(listed), min(left, np.iinfo(np.int32).max)))

    def close(self, slot: int) -> None:
        """Disable edits in the slot until it is opened again."""
        self._send_facts(slot, NOTHING)

    def edit(self, logits: torch.Tensor, draws: Draws, masked: bool) -> bool:
        launch_edit(logits, draws.slots, self.tables, masked)
        return masked

    def count(self, draws: Draws, tokens: torch.Tensor) -> None:
        launch_count(draws.slots, self.tables, tokens)

    def _send_facts(self, slot: int, facts: tuple[int, int, int]) -> None:
        self.tables.facts[slot].copy_(send(np.array(facts, np.int32), self._device))

    def _list(self, slot: int, params: SamplingParams) -> list[int]:
        """Write the biased and banned tokens to the slot's list, and return them without
        duplicates.
        """
        added = dict[int, float]()
        biases, bans = list_edits(params, self._stop_ids)
        for token, amount in biases:
            added[token] = added.get(token, 0.0) + amount
        banned = {*bans}
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
        """Write the slot's token counts for a prompt and the tokens generated so far."""
        ids = np.array((*tokens, *listed), np.int64)
        unique, places = np.unique(ids, return_inverse=True)
        state = np.bincount(places[prompt_length : len(tokens)], minlength=len(unique))
        numbers = state.astype(np.int32)
        numbers[places[: len(tokens)]] |= SEEN.value
        numbers[places[len(tokens) :]] |= LISTED.value
        counts = self.tables.counts[line].zero_()
        counts.index_copy_(0, send(unique, self._device), send(numbers, self._device))
