"""Creates the tokenizer for llguidance and its matchers, and limits the compiling and matching of
grammars.

The front end checks grammars, and the engine applies them. Both create matchers with this module,
so that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WORD_BITS = 32
"""Number of tokens per word of a mask."""

_LIMITS = LLParserLimits(
    # Stops expansions such as "(a{1000}){1000}" after about 40 ms and 20 MB. The largest schemas
    # and choices that are accepted need a tenth.
    initial_lexer_fuel=100_000,
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    verbose_errors=False,  # they would quote the answer so far
)


def read_lexicon(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """Convert a tokenizer to llguidance's format. This takes about half a second.

    tokenizer_json: the result of `tokenizers.Tokenizer.to_str`.
    vocab_size: the number of columns of logits, which may exceed the number of tokens. Masks never
    allow columns without a token.
    ends: the IDs of the stop tokens.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(ends))


def begin_match(lexicon: LLTokenizer, grammar: str) -> LLMatcher:
    """Create a matcher. `is_error()` is true if the grammar is invalid or too large."""
    return LLMatcher(lexicon, grammar, log_level=0, limits=_LIMITS)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask."""
    return -(-vocab_size // WORD_BITS)


def fill_mask(lexicon: LLTokenizer, matcher: LLMatcher, row: np.ndarray) -> None:
    """Write the allowed next tokens to `row` ([W] uint32, contiguous).

    Token t is bit t % 32 of word t // 32. Releases the GIL.

    If forced text spells the name of a special token ("<|im_start|>"), the library allows only that
    token, and then rejects it. In this case, the tokens of the text are allowed instead.
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
    """Return the only token that a mask allows, or None if it allows several tokens or none."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]])
    return None if word & (word - 1) else int(words[0]) * WORD_BITS + word.bit_length() - 1
