"""What the model made of the tokens of a prompt: log-probability, rank, and the likeliest instead.

Owns the blocks in which the head is applied to rows that are scored, so that no tensor [prompt,
vocab] ever exists. Every rank goes through the same blocks; the first keeps what comes of them.
Knows nothing of slots or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.config import SCORE_BLOCK_BYTES
from saccade.core.types import PromptScores
from saccade.nn.protocol import FamilyNet
from saccade.nn.transfer import send


@dataclass(frozen=True, slots=True)
class Wanted:
    """Scores of one run of tokens. States `[row, row + C)` of the batch stand before `tokens`,
    int64 [C], of which the first is the prompt's token `start`; `top` of the best are named.
    """

    row: int
    start: int
    tokens: npt.NDArray[np.int64]
    top: int

    def blocks(self, rows: int) -> Iterator[slice]:
        count = len(self.tokens)
        return (slice(at, min(at + rows, count)) for at in range(0, count, rows))


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one run of C tokens, where they were computed, or in host memory that they are
    being copied to.
    """

    start: int
    ids: torch.Tensor  # [C, 1 + K] int32
    logprobs: torch.Tensor  # [C, 1 + K] float32
    ranks: torch.Tensor  # [C] int32

    def read(self) -> PromptScores:
        """For the front."""
        ids, logprobs, ranks = (
            each.numpy().tobytes() for each in (self.ids, self.logprobs, self.ranks)
        )
        return PromptScores(self.start, ids, logprobs, ranks)


class Scorer:
    """Scores rows of one network. `keeps`: whether this rank reads what comes of it."""

    def __init__(self, net: FamilyNet, keeps: bool) -> None:
        self._net = net
        self._keeps = keeps
        self._rows = max(1, SCORE_BLOCK_BYTES // (4 * net.spec.vocab_size))

    def __call__(self, states: torch.Tensor, wanted: Sequence[Wanted]) -> tuple[Scored, ...]:
        """One for each of `wanted`, from the states [T, hidden] of a step; none on ranks that do
        not keep them.
        """
        found = []
        for each in wanted:
            tokens = send(each.tokens, states.device)
            parts = []
            for block in each.blocks(self._rows):
                rows = states[each.row + block.start : each.row + block.stop]
                logits = self._net.logits(rows)  # [B, V] float32
                if self._keeps:
                    parts.append(score(logits, tokens[block], each.top))
            if parts:
                found.append(Scored(each.start, *map(torch.cat, zip(*parts))))
        return tuple(found)


def score(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [B, 1 + K] int32, logprobs [B, 1 + K] float32 and ranks [B] int32 of tokens [B] by logits
    [B, V] float32, the token itself first. The chosen one's rank counts those that are likelier.
    """
    best, ids = torch.topk(logits, min(top, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = 1 + (logits > chosen).sum(dim=-1, dtype=torch.int32)
    total = logits.logsumexp(dim=-1, keepdim=True)
    ids = torch.cat((tokens.unsqueeze(1), ids), dim=1).int()
    return ids, torch.cat((chosen, best), dim=1) - total, ranks
