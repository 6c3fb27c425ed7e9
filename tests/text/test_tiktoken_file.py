"""A tokenizer from tiktoken's file: tokens are those of tiktoken's algorithm with the published
rules, in any script; a damaged file is named.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from saccade.core.byte_pairs import BYTE_OF
from saccade.core.errors import CheckpointError
from saccade.plugins.grammar.vocabulary import read_lexicon
from saccade.text.prompt.template import Tokenizer

HAN, WORD = r"\p{Han}", r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PUBLISHED = "|".join(
    (
        rf"[{HAN}]+",
        f"{WORD}{UPPER}*{LOWER}+{END}",
        f"{WORD}{UPPER}+{LOWER}*{END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""As the code beside the hub's files has it."""
TEXTS = (
    "All human beings are born free; they're EQUAL in 1948's dignity. I'LL say McDonald's",
    "Все люди рождаются свободными и РАВНЫМИ в своём достоинстве",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ΙΣΟΙ στην αξιοπρέπεια",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق ١٩٤٨",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი",
    "人人生而自由，在尊严和权利上一律平等。他們賦有理性abc和良心123個",
    "すべての人間は、生まれながらにして自由であり、カタカナも漢字も平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다",
    "def f(x):\n    return x**2 != 3  # naïve\r\n\r\n\t\tend   \n\n",
)
LETTERS = "".join(sorted({*"".join(TEXTS), *" '\n\t.,1234567890"}))
NAMES = {"[BOS]": True, "<|im_end|>": True, "<|plain|>": False}
Ranks = Mapping[bytes, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's files, with tokens learnt from the texts."""
    made = Backend(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Split(Regex(PUBLISHED), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=alphabet, min_frequency=1, show_progress=False
        ),
    )
    at = tmp_path_factory.mktemp("ranks")
    tokens = sorted(made.get_vocab().items(), key=lambda each: each[1])
    lines = [
        base64.b64encode(bytes(BYTE_OF[letter] for letter in token)).decode() + f" {rank}"
        for token, rank in tokens
    ]
    (at / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {
        str(len(tokens) + 2 * number): {"content": name, "special": special}
        for number, (name, special) in enumerate(NAMES.items())
    }
    write_settings(at, tokenizer_class="TikTokenTokenizer", added_tokens_decoder=added)
    return at


def write_settings(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    lines = (folder / "tiktoken.model").read_text().split("\n")[:-1]
    pairs = (line.split() for line in lines)
    return {base64.b64decode(word): int(rank) for word, rank in pairs}


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def joined(piece: bytes, ranks: Ranks) -> list[int]:
    """tiktoken's algorithm: of neighbours, those whose token comes first, from the left."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def expected(text: str, ranks: Ranks) -> list[int]:
    pieces = regex.findall(PUBLISHED, text, flags=regex.V1)
    assert "".join(pieces) == text
    return [each for piece in pieces for each in joined(piece.encode(), ranks)]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_tiktokens_tokens(text: str, ours: Tokenizer, ranks: Ranks) -> None:
    assert ours.encode(text) == expected(text, ranks)
    assert ours.decode(ours.encode(text)) == text
    assert ours.encode(text[7:-5].upper()) == expected(text[7:-5].upper(), ranks)


@settings(deadline=None)
@given(st.text(alphabet=LETTERS, max_size=60))
def test_any_mixture_has_tiktokens_tokens(ours: Tokenizer, ranks: Ranks, text: str) -> None:
    assert ours.encode(text) == expected(text, ranks)


def test_reserved_tokens_have_the_published_names_and_places(ours: Tokenizer, ranks: Ranks) -> None:
    first = len(ranks)
    assert ours.encode("a[BOS]b<|im_end|><|plain|>") == [
        *(ranks[b"a"], first, ranks[b"b"], first + 2, first + 4)
    ]
    assert ours.encode(f"<|reserved_token_{first + 255}|>") == [first + 255]
    assert ours.backend.get_vocab_size() == first + 256
    special = {
        each.content for each in ours.backend.get_added_tokens_decoder().values() if each.special
    }
    assert "[BOS]" in special and "<|plain|>" not in special
    assert f"<|reserved_token_{first + 1}|>" in special


def test_grammars_know_the_tokens(ours: Tokenizer, ranks: Ranks) -> None:
    words = read_lexicon(ours.backend.to_str(), len(ranks) + 256, [len(ranks) + 2])
    text = "人人 born free"
    assert words.tokenize_str(text) == ours.encode(text)


def test_tokenizer_json_comes_first(folder: Path, tmp_path: Path) -> None:
    plain = Backend(models.BPE({"a": 0}, []))
    plain.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tiktoken.model").write_text((folder / "tiktoken.model").read_text())
    assert Tokenizer.load(tmp_path).backend.get_vocab() == {"a": 0}


def changed(line: str) -> Callable[[list[str]], None]:
    return lambda lines: lines.__setitem__(3, line)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("? 3"), "line 4 must be a token in base64, a space and its number"),
        (changed("YQ=="), "line 4 must be"),
        (changed("YQ== x"), "line 4 must be"),
        (
            changed("YWFhYWFhYQ== 9999"),
            "expected unique tokens, ranks from 0, and a token for each byte",
        ),
        (lambda lines: lines.append(lines[0]), "expected unique tokens"),
        (lambda lines: lines.clear(), "expected unique tokens"),
    ],
)
def test_a_damaged_file_is_named(
    folder: Path, tmp_path: Path, change: Callable[[list[str]], None], words: str
) -> None:
    lines = (folder / "tiktoken.model").read_text().split("\n")[:-1]
    change(lines)
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    write_settings(tmp_path, tokenizer_class="TikTokenTokenizer")
    with pytest.raises(CheckpointError, match=rf"tiktoken\.model: .*{words}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ([1], "added_tokens_decoder"),
        ({"x": {"content": "<x>"}}, "added_tokens_decoder"),
        ({"7": {"content": "<x>"}}, "7 is not a token from "),
        ({"999999": {"content": "<x>"}}, "999999 is not a token from "),
        ({"1000": {}}, "added_tokens_decoder: 'content'"),
        ({"1000": {"content": "<x>"}, "1001": {"content": "<x>"}}, "contains a token twice"),
    ],
)
def test_damaged_settings_are_named(folder: Path, tmp_path: Path, added: Any, words: str) -> None:
    (tmp_path / "tiktoken.model").write_text((folder / "tiktoken.model").read_text())
    write_settings(tmp_path, tokenizer_class="TikTokenTokenizer", added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: .*{words}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", [None, 5, "QWenTokenizer"])
def test_a_class_with_unknown_rules_is_refused(folder: Path, tmp_path: Path, kind: Any) -> None:
    (tmp_path / "tiktoken.model").write_text((folder / "tiktoken.model").read_text())
    write_settings(tmp_path, tokenizer_class=kind)
    with pytest.raises(CheckpointError, match=r"\(supported: TikTokenTokenizer\): add .*tokenizer"):
        Tokenizer.load(tmp_path)
