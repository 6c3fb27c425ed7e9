"""tokenizer.json and tokenizer_config.json, made from a GGUF file's metadata.

What llama.cpp calls `pre` names the rules that cut text before merges. Each known one is here as
the model's own tokenizer has it, with its normaliser. An unknown one is refused: other rules would
give other tokens.
"""

from __future__ import annotations

from typing import Any

from saccade.gguf.header import GgufFile

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLITS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_TAIL}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}",
}
"""By `tokenizer.ggml.pre`."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Of `tokenizer.ggml.token_type`; tokens of another type are room that no text takes."""
PREFIX = "tokenizer.ggml."


def make_tokenizer(file: GgufFile) -> dict[str, Any]:
    """Make tokenizer.json.

    Raises CheckpointError if the vocabulary is missing or another kind.
    """
    model = _text(file, "model")
    if model != "gpt2":
        raise file.refuse(f"{PREFIX}model {model!r} is not supported; gpt2 is")
    pre = _text(file, "pre")
    if pre not in SPLITS:
        raise file.refuse(
            f"{PREFIX}pre {pre!r} is not supported ({', '.join(SPLITS)} are): take the checkpoint "
            "that the file was made from"
        )
    if file.metadata.get(f"{PREFIX}add_bos_token") is True:
        raise file.refuse(f"{PREFIX}add_bos_token is not supported")
    tokens, types = _list(file, "tokens", str), _list(file, "token_type", int)
    if len(tokens) != len(types):
        raise file.refuse(f"{len(tokens)} tokens, but {len(types)} of {PREFIX}token_type")
    vocabulary = {token: at for at, token in enumerate(tokens) if types[at] == NORMAL}
    added = [at for at in range(len(tokens)) if types[at] in (CONTROL, USER_DEFINED)]
    if len(vocabulary) + len(added) < sum(
        kind in (NORMAL, CONTROL, USER_DEFINED) for kind in types
    ):
        raise file.refuse("two tokens of its vocabulary are the same: the file is damaged")
    merges = [_pair(file, merge) for merge in _list(file, "merges", str)]
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise file.refuse(f"a merge of {left!r} and {right!r}, which its vocabulary lacks")
    bytes_only = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(at, tokens[at], types[at] == CONTROL) for at in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, {"type": "ByteLevel"} | bytes_only],
        },
        "post_processor": {"type": "ByteLevel"} | bytes_only,
        "decoder": {"type": "ByteLevel"} | bytes_only,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def tokenizer_settings(file: GgufFile) -> dict[str, Any]:
    """Make tokenizer_config.json: the tokens by role, and the chat template.

    Raises CheckpointError.
    """
    tokens = _list(file, "tokens", str)
    settings: dict[str, Any] = {"tokenizer_class": "Qwen2TokenizerFast"}
    for role, name in (("eos_token", "eos"), ("pad_token", "padding"), ("bos_token", "bos")):
        at = file.metadata.get(f"{PREFIX}{name}_token_id")
        if at is None or role == "bos_token":  # Qwen's own files have none
            continue
        if not isinstance(at, int) or not 0 <= at < len(tokens):
            raise file.refuse(f"{PREFIX}{name}_token_id {at!r} is none of {len(tokens)} tokens")
        settings[role] = tokens[at]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def _added(at: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": at, "content": content, **flags, "special": special}


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise file.refuse(f"{merge!r} of {PREFIX}merges is no pair of tokens")
    return left, right


def _text(file: GgufFile, name: str) -> str:
    found = file.metadata.get(PREFIX + name)
    if not isinstance(found, str):
        raise file.refuse(f"{PREFIX}{name} is missing: the file has no tokenizer that can be read")
    return found


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    found = file.metadata.get(PREFIX + name)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise file.refuse(f"{PREFIX}{name} is missing: the file has no tokenizer that can be read")
    return found
