"""Rules of tokens beside references that are written from their definitions: transformers' for
`no_repeat_ngram_size`, DeepSeek-OCR's processor for windows, vLLM's bad words and allowed tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from saccade.core.plan import Open
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import SamplingParams
from saccade.plugins.token_rules.row_rules import RowBans, match_ends
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.sampler import Sampler, uniform

VOCAB, CPU = 12, torch.device("cpu")


def forbidden(rules: TokenRules, tokens: Sequence[int], prompt_length: int) -> set[int]:
    """By the definitions, token by token."""
    answer = list(tokens[prompt_length:])
    banned = set(range(VOCAB)) - set(rules.allowed) if rules.allowed else set[int]()
    for words, before in ((rules.bad_words, answer), (rules.banned, [*tokens])):
        for word in words:
            start = len(before) - len(word) + 1
            if start >= 0 and before[start:] == [*word[:-1]]:
                banned.add(word[-1])
    if rule := rules.no_repeat:
        seen = list(tokens) if rule.prompt else answer
        first = max(0, len(seen) - rule.window) if rule.window else 0
        newest = seen[len(seen) - rule.size + 1 :] if rule.size > 1 else []
        for start in range(first, len(seen) - rule.size + 1):
            run = seen[start : start + rule.size]
            if run[:-1] == newest and run[-1] not in rule.spared:
                banned.add(run[-1])
    return banned if len(banned) < VOCAB else set()


def a_case(draw: random.Random) -> tuple[TokenRules, list[int], int]:
    few = draw.choice((2, 3, VOCAB))  # few kinds of tokens repeat much
    tokens = [draw.randrange(few) for _ in range(draw.randrange(1, 60))]
    words = tuple(
        tuple(draw.randrange(few) for _ in range(draw.randrange(1, 5)))
        for _ in range(draw.randrange(4))
    )
    rule = NoRepeat(
        draw.randrange(1, 7),
        draw.choice((0, 0, 5, 20)),
        tuple(draw.sample(range(VOCAB), draw.choice((0, 0, 2)))),
        draw.random() < 0.5,
    )
    allowed = tuple(draw.sample(range(VOCAB), draw.randrange(1, VOCAB)))
    rules = TokenRules(
        allowed if draw.random() < 0.3 else (),
        words if draw.random() < 0.5 else (),
        rule if draw.random() < 0.8 else None,
        banned=words if draw.random() < 0.3 else (),
    )
    return rules, tokens, draw.randrange(len(tokens) + 1)


@pytest.mark.first
@pytest.mark.parametrize("seed", range(4))
def test_what_is_forbidden_is_what_the_definitions_forbid_however_the_tokens_came(
    seed: int,
) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        rules, tokens, prompt_length = a_case(draw)
        known = draw.randrange(prompt_length, len(tokens) + 1)
        row_rules = RowBans(rules, tokens[:known], prompt_length, CPU)
        for end in range(known, len(tokens) + 1):
            if end > known:
                row_rules.add_token(torch.tensor([tokens[end - 1]]))
            row = torch.zeros(VOCAB)
            row_rules.edit(row, 0, False)
            banned = set((row == -torch.inf).nonzero().flatten().tolist())
            assert banned == forbidden(rules, tokens[:end], prompt_length), (rules, tokens[:end])


def test_no_repeat_is_what_transformers_forbids() -> None:
    transformers = pytest.importorskip("transformers")
    draw = random.Random(9)
    for _ in range(100):
        size = draw.randrange(1, 6)
        tokens = [draw.randrange(4) for _ in range(draw.randrange(1, 40))]
        theirs = transformers.NoRepeatNGramLogitsProcessor(size)
        expected = theirs(torch.tensor([tokens]), torch.zeros(1, VOCAB))[0]
        row = torch.zeros(VOCAB)
        RowBans(TokenRules(no_repeat=NoRepeat(size)), tokens, 1, CPU).edit(row, 0, False)
        assert torch.equal(row, expected)


def test_a_beginning_that_repeats_itself_matches_as_far_as_is_asked() -> None:
    assert match_ends(np.array([7] * 6, np.int32), 3).tolist() == [0, 1, 2, 3, 3, 3]
    assert match_ends(np.array([1, 2, 1, 2, 1], np.int32), 9).tolist() == [0, 1, 0, 3, 0]


def drawn(sampler: Sampler, logits: torch.Tensor, count: int) -> int:
    draws = Draws(
        [0],
        [count],
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([uniform(0, count)], dtype=torch.float64),
    )
    return int(sampler(logits.clone().unsqueeze(0), draws)[0])


def opened(tokens: Sequence[int], rules: TokenRules | None = None, prompt_length: int = 1) -> Open:
    return Open(0, tuple(tokens), prompt_length, (), (), SamplingParams(), (), rules)


def answer(
    rules: TokenRules, prompt: list[int], logits: torch.Tensor, length: int, again: int = 0
) -> list[int]:
    """Drawn with one sampler; `again`: the sequence is preempted after so many tokens."""
    tokens = list(prompt)
    sampler = Sampler(VOCAB, 1, (), CPU)
    sampler.open(opened(tokens, rules, len(prompt)))
    for count in range(length):
        if again and count == again:
            sampler.close(0)
            sampler.open(opened(tokens, rules, len(prompt)))
        tokens.append(drawn(sampler, logits, count))
    sampler.close(0)
    return tokens[len(prompt) :]


def test_reasoning_ends_after_its_budget_and_no_sooner() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)  # 11 is best; 5 closes, 4 opens
    begun = TokenRules(thinking=ThinkingBudget(3, 4, 5, True))
    for again in range(5):
        assert answer(begun, [1], logits, 6, again) == [11, 11, 11, 5, 11, 11]
    assert answer(TokenRules(thinking=ThinkingBudget(0, 4, 5, True)), [1], logits, 2) == [5, 11]
    # Nothing has opened it, so nothing ends it.
    closed = TokenRules(thinking=ThinkingBudget(2, 4, 5, False))
    assert answer(closed, [1], logits, 4) == [11] * 4
    # The answer opens it itself.
    logits[4] = 99.0
    assert answer(closed, [1], logits, 6) == [4, 4, 4, 5, 4, 5]


def test_rules_leave_a_slot_with_their_sequence() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    sampler = Sampler(VOCAB, 1, (), CPU)
    sampler.open(opened([1], TokenRules(allowed=(2, 3))))
    assert drawn(sampler, logits, 0) == 3
    sampler.close(0)
    sampler.open(opened([1]))
    assert drawn(sampler, logits, 0) == 11


def test_a_grammar_wins_where_rules_leave_none_of_its_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = Sampler(VOCAB, 1, (), CPU)
    sampler.open(opened([1], TokenRules(allowed=(2, 3))))
    one = torch.zeros(1, dtype=torch.int64)
    draws = Draws([0], [0], one, torch.zeros(1, dtype=torch.float64))
    masks = torch.tensor([[1 << 7]], dtype=torch.int32)
    assert sampler(logits.clone(), draws, masks)[0].tolist() == [7]
    masks = torch.tensor([[1 << 7 | 1 << 3]], dtype=torch.int32)
    assert sampler(logits.clone(), draws, masks)[0].tolist() == [3]
