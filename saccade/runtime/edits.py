"""What changes a row's logits before a token is drawn: penalties for tokens that have been, biases,
and bans on an early end.

Owns one line of the vocabulary's length for each sequence that asks for any of these, on the
device, and counts there the tokens that are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.nn.transfer import send


class Edits:
    """Lines by slot. There are as many lines as sequences have had one at the same time, or up to
    twice as many.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._bias = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._banned = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._lines: dict[int, int] = {}  # slot -> line
        self._free: list[int] = []

    def __contains__(self, slot: int) -> bool:
        return slot in self._lines

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        prompt_length: int,
        bias: Sequence[tuple[int, float]],
        bans: Sequence[int],
    ) -> None:
        """A sequence that asks for something: its prompt and answer so far, what to add to the
        logits of which tokens, and which may not end it early.
        """
        if not self._free:
            self._grow()
        line = self._lines[slot] = self._free.pop()
        for lines in (self._seen, self._counts, self._bias, self._banned):
            lines[line].zero_()
        if tokens:
            self._seen[line].index_fill_(0, self._send(tokens), True)
        if output := tokens[prompt_length:]:
            values, counts = np.unique(np.array(output, np.int64), return_counts=True)
            counted = send(counts.astype(np.float32), self._device)
            self._counts[line].index_copy_(0, send(values, self._device), counted)
        if bias:
            ids, amounts = zip(*bias)
            added = send(np.array(amounts, np.float32), self._device)
            self._bias[line].index_copy_(0, self._send(ids), added)
        if bans:
            self._banned[line].index_fill_(0, self._send(bans), True)

    def close(self, slot: int) -> None:
        if slot in self._lines:
            self._free.append(self._lines.pop(slot))

    def apply(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        penalties: torch.Tensor,
        early: Sequence[bool],
    ) -> None:
        """Change `logits` [E, V] of `slots` in place. penalties: [E, 3], for repetition, presence,
        frequency. early: whose answer may not end yet.

        Repetition penalty: Keskar et al. 2019 (CTRL), over prompt and output. Presence and
        frequency: OpenAI's, over the output.
        """
        lines = self._send([self._lines[slot] for slot in slots])
        repetition, presence, frequency = penalties.split(1, dim=1)
        harder = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(self._seen.index_select(0, lines), harder, logits))
        counts = self._counts.index_select(0, lines)
        logits.sub_(presence * (counts > 0) + frequency * counts)
        logits.add_(self._bias.index_select(0, lines))
        if any(early):
            held = send(np.array(early, np.bool_), self._device).unsqueeze(1)
            logits.masked_fill_(self._banned.index_select(0, lines) & held, -torch.inf)

    def count(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """These were drawn, one [E] for each slot."""
        lines = self._send([self._lines[slot] for slot in slots])
        places = lines * self._seen.shape[1] + tokens
        self._seen.view(-1).index_fill_(0, places, True)
        ones = torch.ones(len(slots), dtype=torch.float32, device=self._device)
        self._counts.view(-1).index_add_(0, places, ones)

    def _grow(self) -> None:
        had = len(self._seen)
        more = max(1, had)
        self._free += range(had, had + more)
        self._seen, self._counts, self._bias, self._banned = (
            torch.cat((lines, lines.new_zeros((more, lines.shape[1]))))
            for lines in (self._seen, self._counts, self._bias, self._banned)
        )

    def _send(self, numbers: Sequence[int]) -> torch.Tensor:
        return send(np.array(numbers, np.int64), self._device)
