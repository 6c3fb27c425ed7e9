"""Walks through a grammar as a model with random weights would take them."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLTokenizer

from saccade.plugins.grammar.matchers import Matcher, Matchers
from tests.text.lexicons import demo_lexicon


def allowed_tokens(matcher: Matcher, words: int) -> np.ndarray:
    """Ids of the tokens that the next mask allows, in order."""
    row = np.zeros(words, np.uint32)
    matcher.fill(row)
    return np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]


def takes(matchers: Matchers, grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = matchers.new_matcher(grammar)
    tokens = demo_lexicon().tokenize_str(text)
    if matcher.count_allowed(tokens) < len(tokens):
        return False
    matcher.accept(tokens)
    return matcher.may_end


def walk(
    matchers: Matchers,
    lexicon: LLTokenizer,
    grammar: str,
    seed: int,
    ends: tuple[int, ...],
    *,
    jump: bool = False,
    longest: int = 3000,
) -> str | None:
    """An answer: any allowed token at random, more and more often one that closes something; with
    `jump`, forced tokens are taken without drawing. None: not at an end after `longest` tokens.
    """
    choose = random.Random(seed)
    closing = {token for text in '"}],' for token in lexicon.tokenize_str(text)} | {*ends}
    matcher, tokens = matchers.new_matcher(grammar), list[int]()
    while not matcher.must_end:
        if len(tokens) > longest:
            return None
        forced = matcher.forced() if jump else ()
        if forced:
            matcher.accept(forced)
            tokens += forced
            continue
        allowed = allowed_tokens(matcher, matchers.words)
        assert len(allowed), "a mask that allows nothing"
        nearest = [token for token in allowed.tolist() if token in closing]
        close = nearest and choose.random() < 0.2 + len(tokens) / 200
        token = choose.choice(nearest) if close else int(choose.choice(allowed))
        matcher.accept([token])
        if token in ends:
            break
        tokens.append(token)
    assert matcher.may_end
    return lexicon.decode_bytes(tokens).decode()
