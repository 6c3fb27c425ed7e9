"""Generates draft tokens with a model's MTP (multi-token prediction) head, for speculative
decoding.

In each step, the head first computes all tokens of the batch, so that its own KV cache is complete.
Then it drafts token by token for the rows that request draft tokens. Draft tokens do not change
outputs. They may be less accurate after a prefix from the cache: the head's last keys in a KV page
depend on the token after the page, and this token may have been a different one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch

from saccade.core.plan import HeadDrafts, Row
from saccade.nn.protocol import Attention, Batch, DraftHead
from saccade.runtime.batch import Batcher


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sampled token, and how many draft tokens to generate after it."""

    slot: int
    at: int  # batch index from which the token was sampled
    place: int  # index of the sampled token in its sequence
    capacity: int  # how many tokens fit in the slot's KV pages
    count: int  # number of draft tokens


class HeadDrafter:
    """Generates draft tokens with the MTP head.

    It is only used on CPUs, because it reads sampled tokens on the host.
    """

    def __init__(self, head: DraftHead, attention: Attention, batcher: Batcher) -> None:
        self._head = head
        self._attention = attention
        self._batcher = batcher

    def __call__(
        self, rows: Sequence[Row], batch: Batch, states: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[HeadDrafts, ...]:
        """Return draft tokens for each row that requests them.

        states: the hidden states of the batch, [T, hidden], after the final norm.
        drawn: the sampled tokens [D], in row order.
        """
        tokens = drawn.tolist()
        shifted = _next_images(batch)
        following = self._following(rows, batch, tokens)
        found = self._head(replace(shifted, tokens=following), states, self._attention)
        behind = [
            DraftRequest(row.slot, last, place, self._batcher.capacity(row.slot), row.head_drafts)
            for row, last, place in _right_ends(rows, batch, tokens)
        ]
        if not behind:
            return ()
        drafts: list[list[int]] = [[] for _ in behind]
        states = found[[each.at for each in behind]]
        alive = list(range(len(behind)))
        for step in range(max(each.count for each in behind)):
            best = self._head.logits(states).argmax(1).tolist()
            for index, token in zip(alive, best):
                drafts[index].append(token)
            going = [
                at
                for at, index in enumerate(alive)
                if step + 1 < behind[index].count
                and behind[index].place + step < behind[index].capacity
            ]
            if not going:
                break
            alive = [alive[at] for at in going]
            places = {behind[index].slot: behind[index].place + step for index in alive}
            single = self._batcher.singles(places, [drafts[index][-1] for index in alive])
            self._attention.plan(single)
            states = self._head(single, states[going], self._attention)
        return tuple(
            HeadDrafts(each.place + 1, tuple(found)) for each, found in zip(behind, drafts)
        )

    def _following(self, rows: Sequence[Row], batch: Batch, drawn: Sequence[int]) -> torch.Tensor:
        """Return the token after each token of the batch, [T].

        The token after a row's last one is the sampled token, the input of the sequence's next row,
        or the next token of the prompt. It is 0 if none of these exists.
        """
        following = torch.zeros_like(batch.tokens)
        following[:-1] = batch.tokens[1:]
        tokens = iter(drawn)
        last: list[int] = []
        for row, after in zip_longest(rows, rows[1:]):
            if row.sample:
                last.append(next(tokens))
            elif after is not None and after.slot == row.slot:
                last.append(after.tokens[0])
            else:
                last.append(self._batcher.known(row.slot, row.start + row.length))
        following[batch.q_starts[1:].long() - 1] = torch.from_numpy(np.array(last, np.int64))
        return following


def _right_ends(
    rows: Sequence[Row], batch: Batch, drawn: Sequence[int]
) -> list[tuple[Row, int, int]]:
    """Return where to draft for each row that requests draft tokens.

    That is after the last of the following rows whose draft token was accepted. Each result is the
    row, the batch index of that accepted token (or of the row's own last token if none was
    accepted), and the index in the sequence of the token that was sampled there.
    """
    found: list[tuple[Row, int, int]] = []
    token, going = -1, False
    tokens, ends = iter(drawn), batch.q_starts[1:].tolist()
    for row, end in zip(rows, ends, strict=True):
        going = row.draft and going and row.tokens[0] == token
        token = next(tokens) if row.sample else -1
        if row.head_drafts:
            found.append((row, end - 1, row.start + row.length))
            going = True
        elif going:
            found[-1] = found[-1][0], end - 1, row.start + row.length
    return found


def _next_images(batch: Batch) -> Batch:
    """Return the batch with each row of image embeddings moved to the previous token.

    The head takes each token's successor as input. Embeddings at a row's first token are dropped,
    because the previous token is not in the batch.
    """
    if not batch.splice_rows.shape[0]:
        return batch
    inside = ~torch.isin(batch.splice_rows, batch.q_starts.long())
    rows = batch.splice_rows[inside] - 1
    return replace(batch, splice_rows=rows, embeddings=batch.embeddings[inside])
