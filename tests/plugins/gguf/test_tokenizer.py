"""The tokenizer made of a GGUF file's metadata gives the tokens of the one that the file was made
from, whatever the text.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError
from saccade.plugins.gguf.header import GgufFile, read_header
from saccade.plugins.gguf.tokenizer import make_tokenizer, tokenizer_settings
from tests.fixtures.gguf_files import write_files

PIECES = (
    *(
        "'s",
        "'LL",
        "don't",
        " the",
        "lazy dog",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\u200d",
        "3",
        "123",
    ),
    *(
        "e\u0301",
        "é",
        "각",
        "\u1100\u1161\u11a8",
        "ﬁ",
        "Å",
        "\u0915\u093e",
        "ไทย",
        "中文",
        "🦙",
        "👩‍🚀",
        "…",
    ),
    *(
        "<|im_end|>",
        "<|image_pad|>",
        "<|im_end",
        "<tool>",
        "!!!",
        "_",
        "->",
        "\x00",
        "\ufeff",
        "a\u0328\u0301",
    ),
)
"""What separates the rules: contractions, marks, spaces, line ends, digits, decomposed letters, and
tokens in text.
"""


def texts(count: int, seed: int = 0) -> list[str]:
    """Random texts of these pieces, of letters of all scripts, and of any code points."""
    rng = random.Random(seed)

    def piece() -> str:
        match rng.randrange(4):
            case 0 | 1:
                return rng.choice(PIECES)
            case 2:
                return unicodedata.normalize(
                    rng.choice(("NFC", "NFD")), chr(rng.randrange(0x20, 0x3100))
                )
            case _:
                at = rng.randrange(0x110000)
                return chr(at) if not 0xD800 <= at < 0xE000 else " "

    return ["".join(piece() for _ in range(rng.randrange(1, 24))) for _ in range(count)]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def pair(
    request: pytest.FixtureRequest,
    gguf_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, GgufFile]:
    """A checkpoint of either `pre`, and its file's header."""
    family: str = request.param
    folder = gguf_checkpoint(family)
    files = write_files(folder, tmp_path_factory.mktemp("out"), Kind.Q8_0)
    return folder, read_header(files.model)


def compare(pair: tuple[Path, GgufFile], count: int) -> None:
    folder, file = pair
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Tokenizer.from_str(json.dumps(make_tokenizer(file)))
    asked = texts(count)
    for text, mine, wanted in zip(
        asked, ours.encode_batch(asked), theirs.encode_batch(asked), strict=True
    ):
        assert mine.ids == wanted.ids, repr(text)
        assert mine.offsets == wanted.offsets or not theirs.post_processor, repr(text)
        assert ours.decode(mine.ids, False) == theirs.decode(wanted.ids, False)


def test_texts_have_the_tokens_of_the_models_own_tokenizer(pair: tuple[Path, GgufFile]) -> None:
    compare(pair, 2_000)


@pytest.mark.slow
def test_100_000_texts_have_them(pair: tuple[Path, GgufFile]) -> None:
    compare(pair, 100_000)


def test_the_rules_differ_where_marks_stand(pair: tuple[Path, GgufFile]) -> None:
    """Or the comparison would not tell one `pre` from another."""
    _, file = pair
    other = {"qwen2": "qwen35", "qwen35": "qwen2"}[file.metadata["tokenizer.ggml.pre"]]
    swapped = replace(file, metadata={**file.metadata, "tokenizer.ggml.pre": other})
    two = [Tokenizer.from_str(json.dumps(make_tokenizer(each))) for each in (file, swapped)]
    asked = texts(2_000)
    cut = [[each.pre_tokenizer.pre_tokenize_str(text) for text in asked] for each in two]
    assert cut[0] != cut[1]


def test_tokens_by_role_and_the_template_are_the_files(pair: tuple[Path, GgufFile]) -> None:
    folder, file = pair
    wanted = json.loads((folder / "tokenizer_config.json").read_text())
    found = tokenizer_settings(file)
    for name in ("eos_token", "pad_token", "chat_template"):
        assert found[name] == wanted[name]


def spoilt(file: GgufFile, **changes: Any) -> GgufFile:
    named = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return replace(file, metadata={**file.metadata, **named})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "rwkv"}, r"pre 'rwkv' is not supported \(qwen2, qwen35, llama-bpe, "),
        ({"model": "t5"}, r"model 't5' is not supported \(supported: gpt2, llama, gemma4\); try"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0] * 600}, "scores do not define the order of merges"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores has 1 values for 600 tokens"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": ["a"]}, "tokenizer.ggml.token_type has 600 values for 1 tokens"),
        ({"tokens": ["a"] * 600}, "its vocabulary contains a token twice"),
        (
            {"merges": ["zzz yyy"]},
            "merges has 'zzz' and 'yyy', but one of them, or both joined, is not a token",
        ),
        ({"merges": ["one"]}, "'one' of tokenizer.ggml.merges is not a pair"),
        ({"add_bos_token": True}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is None"),
        ({"add_eos_token": True}, "add_eos_token is not supported"),
    ],
)
def test_another_vocabulary_is_refused_by_name(
    pair: tuple[Path, GgufFile], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        make_tokenizer(spoilt(pair[1], **changes))


def test_a_token_by_role_that_is_none_is_refused(pair: tuple[Path, GgufFile]) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id 999 is not one of the 600 tokens"):
        tokenizer_settings(spoilt(pair[1], eos_token_id=999))
