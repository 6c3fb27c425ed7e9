"""Builds a tokenizer from a tiktoken file, for checkpoints without tokenizer.json.

A tiktoken file has only tokens and ranks. Text is split before tokens are merged, by code in the
checkpoint that Saccade never runs. This module has equivalent rules for the supported tokenizer
classes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from saccade.core.byte_pairs import BYTE_OF, merges_of
from saccade.core.errors import CheckpointError
from saccade.core.given_paths import read_text, reason, shown

_HAN, _OTHER = r"\p{Han}", r"&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_OTHER}]"
_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_OTHER}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CHARACTERS = {byte: character for character, byte in BYTE_OF.items()}


@dataclass(frozen=True, slots=True)
class CutRules:
    """Settings of a tokenizer class that are not in the tiktoken file."""

    split: str  # the regular expression that splits text into pieces
    reserved: int  # number of special tokens that follow the tokens of the file
    unnamed: str  # format of their names, if tokenizer_config.json does not have them


RULES = {
    "TikTokenTokenizer": CutRules(
        "|".join(
            (
                rf"[{_HAN}]+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
        reserved=256,  # tokenizer_config.json names two more, which the model does not have
        unnamed="<|reserved_token_{}|>",
    )
}
"""Settings by `tokenizer_class` in tokenizer_config.json."""


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from a tiktoken file. settings: the content of tokenizer_config.json.
    Raises CheckpointError.
    """
    kind = settings.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in RULES:
        raise CheckpointError(
            f"{shown(path)}: tokenizer_class {kind!r} is not supported (supported: "
            f"{', '.join(RULES)}): add the fast tokenizer's tokenizer.json to the directory"
        )
    rules, known = RULES[kind], _read_ranks(path)
    model = models.BPE(known, merges_of(known, known), ignore_merges=True)
    made = Tokenizer(model)
    pieces = pre_tokenizers.Split(Regex(rules.split), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    made.decoder = decoders.ByteLevel()
    made.add_tokens(_reserved(path.with_name("tokenizer_config.json"), rules, len(known), settings))
    return made


def _read_ranks(path: Path) -> dict[str, int]:
    """Return token ids by token, in ascending order. Raises CheckpointError if the file is
    damaged.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(path)}: {reason(error)}") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        word, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(word, validate=True)
            found["".join(map(_CHARACTERS.__getitem__, token))] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{shown(path)}: line {number} must be a token in base64, a space and its number"
            ) from None
    ranked = dict(sorted(found.items(), key=lambda each: each[1]))
    if [*ranked.values()] != [*range(len(lines))] or not found.keys() >= BYTE_OF.keys():
        raise CheckpointError(
            f"{shown(path)}: expected unique tokens, ranks from 0, and a token for each byte"
        )
    return ranked


def _reserved(
    path: Path, rules: CutRules, first: int, settings: Mapping[str, Any]
) -> list[AddedToken]:
    """Return the special tokens that follow the tokens in the file.

    path: the path of tokenizer_config.json, for error messages.
    first: the id of the first of them.
    """
    names = {first + at: rules.unnamed.format(first + at) for at in range(rules.reserved)}
    plain = set[int]()
    try:
        for at, token in (settings.get("added_tokens_decoder") or {}).items():
            if int(at) not in names:
                raise ValueError(
                    f"{at} is not a token from {first} to {first + rules.reserved - 1}"
                )
            names[int(at)] = token["content"]
            if not token.get("special", False):
                plain.add(int(at))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{shown(path)}: added_tokens_decoder: {error}") from None
    if len(set(names.values())) < len(names):
        raise CheckpointError(f"{shown(path)}: added_tokens_decoder contains a token twice")
    return [
        AddedToken(name, special=at not in plain, normalized=False) for at, name in names.items()
    ]
