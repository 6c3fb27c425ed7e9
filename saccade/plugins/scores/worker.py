"""Scores the tokens of prompts: log-probabilities, ranks, and the most likely alternatives. This
module also computes readings of a prompt, which are requested instead of an answer: states, or
logits of labels.

The output head is applied to blocks of rows, so that [prompt, vocab] logits need not fit into
memory. All ranks compute the same blocks, and rank 0 returns the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.config import SCORE_BLOCK_BYTES
from saccade.core.plan import ReadRun, ScoreRun, StepResult
from saccade.core.types import PooledOutput, PromptScores
from saccade.kernels.device import send
from saccade.nn.protocol import FamilyNet
from saccade.runtime.row_parts import ExtraRow, RowOutcome


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities and ranks of contiguous runs of prompt tokens.

    runs: for each run, its row in the plan, and the index of its first token.
    tensors: for each run of C tokens, ids [C, 1 + K] int32, logprobs [C, 1 + K] float32 and ranks
    [C] int32.
    """

    runs: Sequence[tuple[int, int]]
    tensors: Sequence[torch.Tensor]

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        packed = (each.numpy().tobytes() for each in found)
        scores = zip(self.runs, zip(packed, packed, packed, strict=True), strict=True)
        return replace(
            result, scores=tuple((row, PromptScores(start, *each)) for (row, start), each in scores)
        )


class Scorer:
    """Scores prompt tokens with one network.

    keeps: whether this rank returns the results.
    """

    def __init__(self, net: FamilyNet, keeps: bool) -> None:
        self._net = net
        self._keeps = keeps
        self._rows = block_rows(net)

    def __call__(
        self, states: torch.Tensor, asking: Sequence[ExtraRow[ScoreRun]]
    ) -> RowOutcome | None:
        runs: list[tuple[int, int]] = []
        tensors: list[torch.Tensor] = []
        for each in asking:
            first, end = each.extra.first, each.extra.end
            tokens = send(each.tokens[first:end], states.device)
            before = states[each.at + first - 1 - each.start :][: end - first]
            parts = []
            for at in range(0, end - first, self._rows):
                logits = self._net.logits(before[at : at + self._rows])  # [B, V] float32
                if self._keeps:
                    parts.append(score(logits, tokens[at : at + self._rows], each.extra.top))
            tensors += map(torch.cat, zip(*parts))
            runs.append((each.row, first))
        return Scored(runs, tensors) if self._keeps else None


@dataclass(frozen=True, slots=True)
class RowsRead:
    """The concatenated readings of runs of tokens.

    tensors: `FamilyNet.readout` [N, width] of runs without labels, and logits [M, K] float32 of
    runs with labels. K is the maximum number of labels, and shorter lists of labels are padded.
    """

    asking: Sequence[ExtraRow[ReadRun]]
    tensors: Sequence[torch.Tensor]

    def add_to(self, result: StepResult, found: Sequence[torch.Tensor]) -> StepResult:
        states, logits = (each.numpy() for each in found)
        left = {False: states, True: logits}
        pooled = []
        for each in self.asking:
            labels, count = each.extra.labels, each.extra.count
            rows, labelled = left[bool(labels)], bool(labels)
            mine, left[labelled] = rows[:count], rows[count:]
            mine = mine[:, : len(labels)] if labelled else mine
            start = each.start + each.length - count
            pooled.append((each.row, PooledOutput(start, mine.shape[1], mine.tobytes())))
        return replace(result, pooled_outputs=tuple(pooled))


class StateReader:
    """Computes embeddings, or logits of labels, at the end of prompts with one network.

    keeps: whether this rank returns the results.
    """

    def __init__(self, net: FamilyNet, keeps: bool) -> None:
        self._net = net
        self._keeps = keeps
        self._rows = block_rows(net)

    def __call__(
        self, states: torch.Tensor, asking: Sequence[ExtraRow[ReadRun]]
    ) -> RowOutcome | None:
        unlabelled = [each for each in asking if not each.extra.labels]
        plain = _last_rows(unlabelled)
        named = _last_rows(each for each in asking if each.extra.labels)
        found = self._net.readout(
            states.index_select(0, send(plain, states.device)), _adapter_rows(unlabelled)
        )
        most = max(len(each.extra.labels) for each in asking)
        labels = np.zeros((len(named), most), np.int64)
        at = 0
        for each in asking:
            if each.extra.labels:
                labels[at : at + each.extra.count, : len(each.extra.labels)] = each.extra.labels
                at += each.extra.count
        rows, ids, parts = send(named, states.device), send(labels, states.device), []
        for start in range(0, len(named), self._rows):
            block = slice(start, start + self._rows)
            logits = self._net.logits(states.index_select(0, rows[block]))  # [B, V] float32
            if self._keeps:
                parts.append(logits.gather(1, ids[block]))
        if not self._keeps:
            return None
        chosen = torch.cat(parts) if parts else found.new_empty((0, 0))
        return RowsRead(asking, (found, chosen))


def block_rows(net: FamilyNet) -> int:
    """Return the number of tokens for which logits are computed at a time, to limit memory."""
    return max(1, SCORE_BLOCK_BYTES // (4 * net.spec.vocab_size))


def _last_rows(asking: Iterable[ExtraRow[ReadRun]]) -> npt.NDArray[np.int64]:
    ends = [(each.at + each.length, each.extra.count) for each in asking]
    runs = [np.arange(end - count, end) for end, count in ends]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def _adapter_rows(asking: Iterable[ExtraRow[ReadRun]]) -> list[tuple[int, slice]]:
    rows, at = [], 0
    for each in asking:
        end = at + each.extra.count
        if each.adapter:
            rows.append((each.adapter, slice(at, end)))
        at = end
    return rows


def score(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score tokens [B] with their logits [B, V] float32.

    top: K, the number of alternatives.

    Returns ids [B, 1 + K] int32 and logprobs [B, 1 + K] float32, first of the token itself and then
    of the K most likely tokens, and ranks [B] int32. The most likely token has rank 1.
    """
    best, ids = torch.topk(logits, min(top, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = 1 + (logits > chosen).sum(dim=-1, dtype=torch.int32)
    total = logits.logsumexp(dim=-1, keepdim=True)
    ids = torch.cat((tokens.unsqueeze(1), ids), dim=1).int()
    return ids, torch.cat((chosen, best), dim=1) - total, ranks
