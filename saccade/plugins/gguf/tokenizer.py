"""Creates tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

The field `tokenizer.ggml.pre` names the pre-tokenizer. This module defines each supported
pre-tokenizer as in the model's own tokenizer, with its normalizer. Unknown ones are rejected,
because any substitute would produce different tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.byte_pairs import merges_of as all_merges
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.known import FOLDER_MAY

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A pre-tokenizer, and the settings that belong to it."""

    split: str | None  # a regular expression, or None for GPT-2's
    digits: bool = False  # split digits off first
    normal: str | None = None  # the Unicode normalization form
    whole: bool = False  # a piece that is a token is not split, even if the merges could split it
    # whether a plain text starts with the BOS token if the file does not specify it. None: the
    # model has no BOS token.
    bos: bool | None = False


RULES = {
    "qwen2": Rules(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}", normal="NFC", bos=None),
    "qwen35": Rules(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}",
        normal="NFC",
        bos=None,
    ),
    "llama-bpe": Rules(_LLAMA3, whole=True, bos=True),
    "glm4": Rules(_LLAMA3, whole=True, bos=None),
    "tekken": Rules(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}",
        whole=True,
        bos=True,
    ),
    "gpt-4o": Rules(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
    ),
    "smollm": Rules(None, digits=True),
    "gpt-2": Rules(None),
}
"""Pre-tokenizers by their name in `tokenizer.ggml.pre`."""
SAME = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "lfm2": "llama-bpe",
    "pixtral": "llama-bpe",
    "starcoder": "smollm",
    "refact": "smollm",
}
"""Maps other names of pre-tokenizers to the ones in `RULES`."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Token types in `tokenizer.ggml.token_type`. Tokens of any other type are padding."""
PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
"""SentencePiece's symbol for a space."""
ROLES = {
    "eos_token": "eos",
    "pad_token": "padding",
    "bos_token": "bos",
    "unk_token": "unknown",
}


def make_tokenizer(file: GgufFile, keep_space: Collection[str] | None = None) -> dict[str, Any]:
    """Create the content of tokenizer.json.

    keep_space: as in the model's `TextKind`.

    Raises CheckpointError if the vocabulary is missing or not supported.
    """
    model = _text(file, "model")
    if model not in MAKERS:
        raise file.refuse(
            f"{PREFIX}model {model!r} is not supported (supported: {', '.join(MAKERS)}); "
            f"{FOLDER_MAY}"
        )
    if file.metadata.get(f"{PREFIX}add_eos_token") is True:
        raise file.refuse(f"{PREFIX}add_eos_token is not supported")
    vocabulary = FileVocabulary.read(file, keep_space)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **MAKERS[model](file, vocabulary),
    }


def merged_by_bytes(file: GgufFile, vocabulary: FileVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for byte-level BPE, as in GPT-2."""
    rules = _rules(file)
    known = vocabulary.numbered(NORMAL)
    merges = [_pair(file, merge) for merge in _list(file, "merges", str)]
    for left, right in merges:
        if not {left, right, left + right} <= known.keys():
            raise file.refuse(
                f"{PREFIX}merges has {left!r} and {right!r}, but one of them, or both joined, is "
                "not a token"
            )
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    steps = [first] if rules.digits else []
    if rules.split is not None:
        pattern = {"pattern": {"Regex": rules.split}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **pattern})
    steps.append(bytes_only | {"use_regex": rules.split is None})
    after = bytes_only | {"use_regex": False}
    return {
        "added_tokens": vocabulary.added(CONTROL, USER_DEFINED),
        "normalizer": None if rules.normal is None else {"type": rules.normal},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _begun(file, vocabulary, bool(rules.bos), after),
        "decoder": after,
        "model": bpe(known, merges, whole=rules.whole),
    }


def merged_by_score(file: GgufFile, vocabulary: FileVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece, with merges derived from scores."""
    scores = _list(file, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise file.refuse(
            f"{PREFIX}scores has {len(scores)} values for {len(vocabulary.tokens)} tokens"
        )
    return _spaced(file, vocabulary, merges_of(file, vocabulary.of_type(NORMAL), scores))


def merged_by_rank(file: GgufFile, vocabulary: FileVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece, with the merges that the file lists."""
    return _spaced(file, vocabulary, [_pair(file, each) for each in _list(file, "merges", str)])


def _spaced(
    file: GgufFile, vocabulary: FileVocabulary, merges: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return the parts of tokenizer.json for a vocabulary in which a symbol replaces spaces."""
    spaced = file.metadata.get(f"{PREFIX}add_space_prefix") is not False
    keep = vocabulary.keep_space
    known = vocabulary.numbered(NORMAL, BYTE, UNKNOWN)
    at = file.metadata.get(f"{PREFIX}unknown_token_id")
    unknown = vocabulary.tokens[at] if isinstance(at, int) and at in known.values() else None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    before = [{"type": "Prepend", "prepend": SPACE}, replace] if spaced else [replace]
    after = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if spaced else [])]
    return {
        "added_tokens": [
            each | {"rstrip": keep is not None and each["content"] not in keep}
            for each in vocabulary.added(CONTROL, USER_DEFINED, UNKNOWN)
        ],
        "normalizer": {"type": "Sequence", "normalizers": before},
        "pre_tokenizer": None,
        "post_processor": _begun(file, vocabulary, True, None),
        "decoder": {"type": "Sequence", "decoders": after},
        "model": bpe(known, merges)
        | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


MAKERS = {"gpt2": merged_by_bytes, "llama": merged_by_score, "gemma4": merged_by_rank}
"""Functions that create the parts of tokenizer.json, by `tokenizer.ggml.model`."""


def merges_of(
    file: GgufFile, known: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Derive the merges from scores, the best first. SentencePiece merges the pair whose token has
    the highest score.
    """
    if len({scores[at] for at in known.values()}) < len(known) // 2:
        raise file.refuse(
            f"{PREFIX}scores do not define the order of merges (many are equal): use a file that "
            "was made from the model's tokenizer.model, or the original checkpoint"
        )
    ranked = sorted(known, key=lambda token: (-scores[known[token]], known[token]))
    return all_merges(known, ranked)


def bpe(
    known: Mapping[str, int], merges: Sequence[tuple[str, str]], *, whole: bool = False
) -> dict[str, Any]:
    """Return the model section of tokenizer.json.

    whole: do not split a piece that is a token, even if the merges could split it.
    """
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole,
        "vocab": known,
        "merges": merges,
    }


def _begun(
    file: GgufFile, vocabulary: FileVocabulary, usual: bool, after: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the post-processor `after`, with a step that prepends the BOS token if the file
    requires it.

    usual: whether a BOS token is prepended if the file does not specify it.
    """
    wanted = file.metadata.get(f"{PREFIX}add_bos_token", usual)
    if not wanted:
        return after
    at = file.metadata.get(f"{PREFIX}bos_token_id")
    if not isinstance(at, int) or not 0 <= at < len(vocabulary.tokens):
        raise file.refuse(
            f"{PREFIX}add_bos_token is true, but {PREFIX}bos_token_id is {at!r}, which is not one "
            f"of the {len(vocabulary.tokens)} tokens"
        )
    token = vocabulary.tokens[at]
    first, text, second = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    begin = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, first, second],
        "special_tokens": {token: {"id": token, "ids": [at], "tokens": [token]}},
    }
    return begin if after is None else {"type": "Sequence", "processors": [after, begin]}


@dataclass(frozen=True, slots=True)
class FileVocabulary:
    """The tokens of a file, and the type of each.

    keep_space: as in `TextKind`.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    keep_space: Collection[str] | None

    @classmethod
    def read(cls, file: GgufFile, keep_space: Collection[str] | None) -> FileVocabulary:
        """Read the vocabulary. Raises CheckpointError if it is damaged."""
        tokens, types = _list(file, "tokens", str), _list(file, "token_type", int)
        if len(tokens) != len(types):
            raise file.refuse(
                f"{PREFIX}token_type has {len(types)} values for {len(tokens)} tokens"
            )
        taken = [token for token, kind in zip(tokens, types) if kind == NORMAL]
        if len(set(taken)) < len(taken):
            raise file.refuse("its vocabulary contains a token twice: the file is damaged")
        return cls(tokens, types, keep_space)

    def of_type(self, kind: int) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens) if self.types[at] == kind}

    def numbered(self, *types: int) -> dict[str, int]:
        """Return the IDs of tokens of these types, and of all special tokens.

        Special tokens are included because the tokenizers library would assign new IDs to those
        that are not in the vocabulary.
        """
        found = {token: at for each in types for token, at in self.of_type(each).items()}
        for at, token in enumerate(self.tokens):
            if self.types[at] in (CONTROL, USER_DEFINED):
                found.setdefault(token, at)
        return found

    def added(self, *types: int) -> list[dict[str, Any]]:
        """Return the entries for tokens of these types, which are matched before a text is
        split.
        """
        return [
            _added(at, self.tokens[at], kind != USER_DEFINED)
            for at, kind in enumerate(self.types)
            if kind in types
        ]


def tokenizer_settings(file: GgufFile) -> dict[str, Any]:
    """Create the content of tokenizer_config.json: the special tokens, and the chat template.

    Raises CheckpointError.
    """
    tokens = _list(file, "tokens", str)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in ROLES.items():
        at = file.metadata.get(f"{PREFIX}{name}_token_id")
        if at is None or (name == "bos" and not _has_bos(file)):
            continue
        if not isinstance(at, int) or not 0 <= at < len(tokens):
            raise file.refuse(
                f"{PREFIX}{name}_token_id {at!r} is not one of the {len(tokens)} tokens"
            )
        settings[role] = tokens[at]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def _has_bos(file: GgufFile) -> bool:
    """Return False if the model has no BOS token, even if its file lists one."""
    return _text(file, "model") != "gpt2" or _rules(file).bos is not None


def _rules(file: GgufFile) -> Rules:
    pre = _text(file, "pre")
    if (pre := SAME.get(pre, pre)) not in RULES:
        raise file.refuse(
            f"{PREFIX}pre {pre!r} is not supported ({', '.join([*RULES, *SAME])} are): use the "
            "checkpoint that the file was made from"
        )
    return RULES[pre]


def _added(at: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": at, "content": content, **flags, "special": special}


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise file.refuse(f"{merge!r} of {PREFIX}merges is not a pair of tokens")
    return left, right


def _text(file: GgufFile, name: str) -> str:
    found = file.metadata.get(PREFIX + name)
    if not isinstance(found, str):
        raise file.refuse(f"{PREFIX}{name} is missing: the file has no supported tokenizer")
    return found


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    found = file.metadata.get(PREFIX + name)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise file.refuse(f"{PREFIX}{name} is missing: the file has no supported tokenizer")
    return found
