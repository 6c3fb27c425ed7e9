"""Draft tokens from a model's MTP head: for each row that asks, the tokens after the one drawn.

Owns only the way through the head. It goes over all tokens in a step, so that its keys and values
are whole, then token by token behind the rows that ask. Draft tokens leave answers unchanged. Those
behind a prefix from the cache may be worse, since a page's last keys saw another next token.
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
    """A place to draft behind.

    Batch row `at` has drawn the token at `place` in a slot's sequence. The slot's pages hold
    `capacity` tokens. count: the draft tokens asked for.
    """

    slot: int
    at: int
    place: int
    capacity: int
    count: int


class HeadDrafter:
    """Drafts with the MTP head, on CPUs: it reads sampled tokens one by one."""

    def __init__(self, head: DraftHead, attention: Attention, batcher: Batcher) -> None:
        self._head = head
        self._attention = attention
        self._batcher = batcher

    def __call__(
        self, rows: Sequence[Row], batch: Batch, states: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[HeadDrafts, ...]:
        """Draft for each row that asks.

        states: the batch's, [T, hidden], normed. drawn: [D], the tokens for rows that draw, in row
        order.
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
        """Return the token after each in the batch, [T].

        It is drawn, or in the sequence's next row, or known from the prompt, else 0.
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
    """Find the last accepted draft token behind each row that asks.

    Returns the row, that token's batch row (the row's own last one if there is no such token), and
    the place of the token drawn there.
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
    """Move each image row to the token before it.

    Image rows at a row's first token are left out, since the token before is outside of this batch.
    """
    if not batch.splice_rows.shape[0]:
        return batch
    inside = ~torch.isin(batch.splice_rows, batch.q_starts.long())
    rows = batch.splice_rows[inside] - 1
    return replace(batch, splice_rows=rows, embeddings=batch.embeddings[inside])
