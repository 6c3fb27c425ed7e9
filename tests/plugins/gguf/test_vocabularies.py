"""Each rule by which files say that text is cut gives the tokens of a tokenizer that was made
without them: by the library's own classes, trained on the same text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Regex, SentencePieceBPETokenizer, Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel as BytesDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.trainers import BpeTrainer

from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.known import text_kind
from saccade.plugins.gguf.tokenizer import make_tokenizer
from tests.plugins.gguf.test_tokenizer import texts

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in the tokenizer.json of Llama 3, of Pixtral and of GLM-4."""
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in Mistral's tekken.json."""
CORPUS = (
    "the quick brown fox jumps over the lazy dog; isn't it? 1234 567 89 0",
    "быстрая лиса γρήγορη αλεπού الثعلب השועל तेज़ लोमड़ी สุนัขจิ้งจอก 速い狐 빠른 여우 狐狸",
    "def f(x):\n    return x + 1\n\n\n\tEND   don't DON'T",
)
SPECIAL = ("<|begin|>", "<|end|>")


def trained(cut: Any) -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = cut, BytesDecoder()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=[*SPECIAL]
    )
    made.train_from_iterator(CORPUS * 4, trainer)
    return made


def as_file(made: Tokenizer, **fields: Any) -> GgufFile:
    data = json.loads(made.to_str())
    vocabulary = data["model"]["vocab"]
    special = {each["content"] for each in data["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [int(TokenType.CONTROL if each in special else TokenType.NORMAL) for each in tokens]
    merges = [" ".join(pair) for pair in data["model"]["merges"]]
    found = {"tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 0} | fields
    named = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    return GgufFile(Path("made.gguf"), named, {})


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PIECES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), PIECES])


DIGITS = pre_tokenizers.Digits(individual_digits=True)
CUTS = {
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([DIGITS, BYTES]),
    "tekken": split_by(TEKKEN),
    **dict.fromkeys(("llama-bpe", "pixtral", "glm4"), split_by(LLAMA3)),
}
BEGUN = ("llama-bpe", "pixtral", "tekken")
"""Whose bare texts begin with a token of their own."""


@pytest.mark.parametrize("pre", CUTS)
def test_texts_have_the_tokens_of_the_rule_that_a_file_names(pre: str) -> None:
    theirs = trained(CUTS[pre])
    ours = Tokenizer.from_str(json.dumps(make_tokenizer(as_file(theirs, model="gpt2", pre=pre))))
    for text in (*texts(1_000), *CORPUS, "<|begin|>a 12<|end|>"):
        wanted = theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted, repr(text)
        assert ours.decode(wanted, False) == theirs.decode(wanted, False)
    begun = ours.encode("a", add_special_tokens=True).ids
    assert (begun[0] == 0) == (pre in BEGUN)


@pytest.mark.parametrize("spaced", [True, False])
def test_merges_follow_from_scores_as_in_sentencepiece(*, spaced: bool) -> None:
    trainer = SentencePieceBPETokenizer(add_prefix_space=spaced)
    trainer.train_from_iterator(
        CORPUS * 4, vocab_size=500, show_progress=False, special_tokens=["<unk>", *SPECIAL]
    )
    data = json.loads(trainer._tokenizer.to_str())
    ranks = {"".join(pair): at for at, pair in enumerate(data["model"]["merges"])}
    vocabulary = data["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [
        {"<unk>": TokenType.UNKNOWN}.get(
            each, TokenType.CONTROL if each in SPECIAL else TokenType.NORMAL
        )
        for each in tokens
    ]
    scores = [-float(ranks.get(each, 1000 + at)) for at, each in enumerate(tokens)]
    named = {
        "model": "llama",
        "tokens": tokens + pieces,
        "token_type": [int(each) for each in kinds] + [int(TokenType.BYTE)] * 256,
        "scores": scores + [0.0] * 256,
        "bos_token_id": 1,
        "unknown_token_id": 0,
        "add_space_prefix": spaced,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in named.items()}
    file = GgufFile(Path("made.gguf"), metadata, {})
    ours = Tokenizer.from_str(json.dumps(make_tokenizer(file)))
    theirs = Tokenizer(
        BPE(
            dict(zip(named["tokens"], range(len(tokens) + 256))),  # type: ignore[call-overload]
            [tuple(each) for each in data["model"]["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    space = Replace(" ", "\u2581")
    theirs.normalizer = Normalizers([Prepend("\u2581"), space] if spaced else [space])
    for text in (*texts(1_000), *CORPUS):
        plain = text.replace("<|", "< |")
        mine = ours.encode(plain, add_special_tokens=False).ids
        assert mine == theirs.encode(plain).ids, repr(plain)
    phi = GgufFile(Path("made.gguf"), {**metadata, "general.architecture": "phi3"}, {})
    stripped = Tokenizer.from_str(json.dumps(make_tokenizer(phi, text_kind(phi).keep_space)))
    ids = [each.encode("<|end|> \na").ids for each in (stripped, ours)]
    assert ids[0] == stripped.encode("<|end|>a").ids != ids[1]
    assert ours.decode(ours.encode("a  b\n").ids) == "a  b\n"
    assert ours.encode("a").ids[0] == 1
