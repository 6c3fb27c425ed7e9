"""A tokenizer as llguidance reads it, and the bounds for compiling and matching grammars.

Owns the only way to make a matcher, so that the front, which checks a grammar, and the engine,
which follows it, agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WORD_BITS = 32
"""Tokens that one word of a mask speaks of."""

_LIMITS = LLParserLimits(
    # What expands beyond it ("(a{1000}){1000}") is cut; it takes about 40 ms and 20 MB. The largest
    # schemas and choices that are taken need a tenth.
    initial_lexer_fuel=100_000,
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    verbose_errors=False,  # they quote the answer so far
)


def read_lexicon(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """Read a tokenizer for llguidance. Takes about half a second.

    `tokenizer_json`: as `tokenizers.Tokenizer.to_str` writes it. vocab_size: the logits' columns,
    which may outnumber the tokenizer's tokens. Masks disallow the columns without a token. ends:
    the tokens that end an answer.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(ends))


def begin_match(lexicon: LLTokenizer, grammar: str) -> LLMatcher:
    """Create a matcher before its first token. `is_error()` is true for a wrong or too large
    grammar.
    """
    return LLMatcher(lexicon, grammar, log_level=0, limits=_LIMITS)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in one mask row."""
    return -(-vocab_size // WORD_BITS)


def fill_mask(lexicon: LLTokenizer, matcher: LLMatcher, row: np.ndarray) -> None:
    """Write the allowed next tokens into `row` ([W] uint32, contiguous).

    Token t is bit t % 32 in word t // 32. Other threads run meanwhile.

    If forced text spells a special token's name ("<|im_start|>"), the library allows only the token
    and then refuses it. Then the letters are allowed instead.
    """
    assert row.dtype == np.uint32 and row.flags["C_CONTIGUOUS"] and row.ndim == 1
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    only = _single(row)
    if only is None or (only in lexicon.eos_tokens and matcher.is_accepting()):
        return
    if matcher.validate_tokens([only]) or not (forced := matcher.compute_ff_bytes()):
        return
    row[only // WORD_BITS] = 0
    whole = len(lexicon.decode_bytes([only]))
    for part in (forced[: whole - 1], forced[:1]):
        for token in lexicon.tokenize_bytes(part)[:1]:
            if matcher.validate_tokens([token]):
                row[token // WORD_BITS] = np.uint32(1 << token % WORD_BITS)
                return


def _single(row: np.ndarray) -> int | None:
    """Return the only token that a mask allows, or None if it allows several."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]])
    return None if word & (word - 1) else int(words[0]) * WORD_BITS + word.bit_length() - 1
