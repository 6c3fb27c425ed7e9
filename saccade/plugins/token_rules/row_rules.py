"""Applies `TokenRules` to logits: bans or forces next tokens, depending on the tokens so far.

The tokens of each sequence that has rules are stored on the device. Sampled tokens are added
without a host synchronization. A step takes one pass over the tokens, and one over the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.core.plan import Open
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.kernels.device import send

ROOM = 256
"""Initial spare capacity for tokens."""
_ANY, _NONE = -1, -2
"""Wildcards in the prefix of a bad word: any token, and the position before the answer's first
token.
"""


class _Ngrams:
    """The tokens so far, and for each position, how many tokens before it equal the latest tokens.

    The `matched[j]` tokens before index j equal the latest `matched[j]` tokens. After one more
    token `t`, the match before index j + 1 is `matched[j] + 1` if token j is `t`, and 0 otherwise.
    """

    def __init__(self, rule: NoRepeat, tokens: Sequence[int], device: torch.device) -> None:
        self._rule = rule
        ids = np.array(tokens, np.int32)
        self._length = len(ids)
        self._ids = torch.zeros(len(ids) + ROOM, dtype=torch.int32, device=device)
        self._ids[: len(ids)].copy_(send(ids, device))
        self._matched = torch.zeros(len(ids) + ROOM, dtype=torch.int32, device=device)
        self._matched[: len(ids)].copy_(send(match_ends(ids, rule.size - 1), device))
        spared = np.array(rule.spared, np.int32)
        self._spared = send(spared, device) if rule.spared else None

    def ban(self, row: torch.Tensor) -> None:
        """Set the logits of tokens that would complete a repeated n-gram to -inf."""
        size, length = self._rule.size, self._length
        first = max(0, length - self._rule.window) if self._rule.window else 0
        first += size - 1  # the index of the last token of the first n-gram in the window
        if first >= length:
            return
        ids = self._ids[first:length]
        banned = self._matched[first:length] >= size - 1
        if self._spared is not None:
            banned &= ~torch.isin(ids, self._spared)
        row.index_add_(0, ids, torch.where(banned, -torch.inf, 0.0).to(row.dtype))

    def add_token(self, token: torch.Tensor) -> None:
        length = self._length
        if length + 1 >= len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._matched = torch.cat((self._matched, torch.zeros_like(self._matched)))
        same = self._ids[:length] == token
        grown = torch.where(same, self._matched[:length] + 1, 0)
        self._matched[1 : length + 1].copy_(grown)
        self._ids[length : length + 1].copy_(token)
        self._length += 1


def match_ends(ids: np.ndarray, most: int) -> np.ndarray:
    """For each index j, count how many tokens directly before j equal the last tokens of `ids` [L].

    The counts, int32 [L], are at most `most`.
    """
    length = len(ids)
    matched = np.zeros(length, np.int32)
    places = np.arange(length)  # the indices that match so far
    for back in range(1, min(most, length) + 1):
        places = places[places >= back]
        places = places[ids[places - back] == ids[length - back]]
        if not len(places):
            break
        matched[places] = back
    return matched


class _BadWords:
    """The prefixes and last tokens of bad words, and the latest tokens of the answer."""

    def __init__(
        self, words: Sequence[Sequence[int]], answer: Sequence[int], device: torch.device
    ) -> None:
        width = max(map(len, words)) - 1
        before = np.full((len(words), width), _ANY, np.int64)
        for line, word in zip(before, words):
            line[width - len(word) + 1 :] = word[:-1]
        tail = [_NONE] * width + [*answer]
        self._before = send(before, device)
        self._last = send(np.array([word[-1] for word in words], np.int64), device)
        self._tail = send(np.array(tail[len(tail) - width :], np.int64), device)

    def ban(self, row: torch.Tensor) -> None:
        """Set the logits of tokens that would complete a bad word to -inf."""
        met = ((self._before == self._tail) | (self._before == _ANY)).all(dim=1)
        row.index_add_(0, self._last, torch.where(met, -torch.inf, 0.0).to(row.dtype))

    def add_token(self, token: torch.Tensor) -> None:
        if len(self._tail):
            self._tail = torch.cat((self._tail[1:], token))


class RowThinking:
    """The state of an answer's reasoning, and the remaining tokens of its budget."""

    def __init__(
        self, budget: ThinkingBudget, answer: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._budget = budget
        self._inside = torch.tensor([budget.begun], device=device)
        self._left = torch.tensor([budget.tokens], dtype=torch.int64, device=device)
        self._ending = torch.full((vocab_size,), -torch.inf, device=device)
        self._ending[budget.close] = 0.0
        for token in answer:
            self.add_token(torch.tensor([token], device=device))

    @classmethod
    def of(
        cls, opened: Open, vocab_size: int, _: Sequence[int], device: torch.device
    ) -> RowThinking:
        """Create the state for a sequence, from its answer so far."""
        assert opened.rules is not None and opened.rules.thinking is not None
        answer = opened.tokens[opened.prompt_length :]
        return cls(opened.rules.thinking, answer, vocab_size, device)

    def edit(self, row: torch.Tensor, _: int, masked: bool, /) -> bool:
        """Force the end of reasoning if the budget is used up and the grammar allows it. Returns
        `masked` unchanged.
        """
        close = slice(self._budget.close, self._budget.close + 1)
        due = self._inside & (self._left <= 0) & (row[close] > -torch.inf)
        row.copy_(torch.where(due, self._ending, row))
        return masked

    def add_token(self, token: torch.Tensor) -> None:
        self._left = self._left - self._inside.long()
        goes_on = self._inside & (token != self._budget.close)
        self._inside = goes_on | (token == self._budget.open)


class RowBans:
    """The tokens that a sequence's rules forbid."""

    def __init__(
        self, rules: TokenRules, tokens: Sequence[int], prompt_length: int, device: torch.device
    ) -> None:
        """Set up the rules.

        tokens: the prompt and the answer so far.
        """
        answer = tokens[prompt_length:]
        self._allowed = send(np.array(rules.allowed, np.int64), device) if rules.allowed else None
        self._kinds: list[_BadWords | _Ngrams] = []
        if rules.bad_words:
            self._kinds.append(_BadWords(rules.bad_words, answer, device))
        if rules.banned:
            self._kinds.append(_BadWords(rules.banned, tokens, device))
        if rules.no_repeat:
            seen = tokens if rules.no_repeat.prompt else answer
            self._kinds.append(_Ngrams(rules.no_repeat, seen, device))

    @classmethod
    def of(cls, opened: Open, _size: int, _ends: Sequence[int], device: torch.device) -> RowBans:
        """Create the bans for a sequence, from its prompt and its answer so far."""
        assert opened.rules is not None
        return cls(opened.rules, opened.tokens, opened.prompt_length, device)

    def edit(self, row: torch.Tensor, _count: int, _masked: bool, /) -> bool:
        """Forbid tokens, unless that would forbid all of them. Returns True, because some logits
        are now -inf.
        """
        before = row.clone()
        if self._allowed is not None:
            row.fill_(-torch.inf)
            row.index_copy_(0, self._allowed, before.index_select(0, self._allowed))
        for kind in self._kinds:
            kind.ban(row)
        row.copy_(torch.where(row.amax() == -torch.inf, before, row))
        return True

    def add_token(self, token: torch.Tensor) -> None:
        for kind in self._kinds:
            kind.add_token(token)
