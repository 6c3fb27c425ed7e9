"""Tokenizers for tests of grammars: the demo model's, and one of Qwen's size."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from saccade.plugins.grammar.vocabulary import read_lexicon

DEMO = Path(__file__).parents[2] / "saccade" / "demo" / "model" / "tokenizer.json"
DEMO_ENDS = (2, 0)
DEMO_VOCAB = 512
LARGE_VOCAB = 152_064
LARGE_ENDS = (151_644, 151_643)


@cache
def demo_lexicon() -> LLTokenizer:
    """473 tokens in 512 columns."""
    return read_lexicon(DEMO.read_text(), DEMO_VOCAB, DEMO_ENDS)


@cache
def large_lexicon() -> LLTokenizer:
    """As many tokens as Qwen's tokenizers have, mostly words; tags as added tokens, like theirs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = ['"}', '":', '", "', "},", "]}", '{"', "\\n", "\\u"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*ends, *(a + b for a in letters for b in letters)]
    words += [f"Ġw{number}" for number in range(151_643 - len(alphabet) - len(words))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [
            AddedToken(tag, special=False, normalized=False)
            for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>")
        ]
    )
    return read_lexicon(tokenizer.to_str(), LARGE_VOCAB, LARGE_ENDS)
