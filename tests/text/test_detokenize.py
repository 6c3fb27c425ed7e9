"""Detokenising and stop strings: deltas add up to the whole, characters stay whole, stops are found
however tokens cut them.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from saccade.core.errors import CheckpointError
from saccade.text.answer.detokenize import Detokenizer, StopStrings, Vocabulary


def byte_level() -> Tokenizer:
    """All 256 bytes, some merges that cut across characters, a special and a plain added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox 中文字符 日本語 émigré naïve 👍🏽👍🏽 " * 5], trainer
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("→日", normalized=False)]
    )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As in Llama's tokenizer.json: a visible space, bytes as a fallback, one space stripped at the
    start.
    """
    words = ["\u2581the", "\u2581", "q", "u", "i", "c", "k", "é", "\u2581the\u2581"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        word: 256 + i for i, word in enumerate(words)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


TOKENIZER = byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
tokens = st.integers(0, TOKENIZER.get_vocab_size() + 2)


def id_of(token: str) -> int:
    id = TOKENIZER.token_to_id(token)
    assert id is not None
    return id


def deltas(ids: list[int], vocabulary: Vocabulary = VOCABULARY) -> list[str]:
    text = Detokenizer(vocabulary)
    return [*(text.feed([token]) for token in ids), text.end()]


@given(st.text())
def test_the_deltas_of_any_text_are_that_text_and_hold_whole_characters(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    pieces = deltas(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(tokens))
def test_the_deltas_of_any_tokens_add_up_to_decoding_them_at_once(ids: list[int]) -> None:
    assert "".join(deltas(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(tokens), st.data())
def test_how_tokens_are_grouped_does_not_matter(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    text = Detokenizer(VOCABULARY)
    assert text.feed(ids[:cut]) + text.feed(ids[cut:]) + text.end() == "".join(deltas(ids))


def test_a_character_of_several_tokens_appears_with_its_last() -> None:
    ids = [
        id_of(piece)
        for piece in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]
    ]
    assert len(ids) == 4
    assert deltas(ids) == ["", "", "", "😀", ""]
    assert deltas(ids[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_that_are_tags_of_calls_show_their_names() -> None:
    ids = [id_of("t"), id_of("<|end|>"), id_of("t")]
    text = Detokenizer(VOCABULARY, tags=frozenset({"<|end|>", "<none>"}))
    assert text.feed(ids) + text.end() == "t<|end|>t"


def test_special_tokens_show_nothing_and_plain_added_tokens_show_themselves() -> None:
    end, call, arrow = (id_of(name) for name in ("<|end|>", "<tool_call>", "→日"))
    assert deltas([call, end, arrow]) == ["<tool_call>", "", "→日", ""]
    assert VOCABULARY.name_of(end) == b"<|end|>"
    assert VOCABULARY.bytes_of(10**6) == b""


@settings(max_examples=50)
@given(st.text(alphabet="the quick é").filter(lambda text: text.isascii() or "é" in text))
def test_a_sentencepiece_answer_loses_its_first_space_only(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text.replace(" ", "\u2581")).ids
    assert "".join(deltas(ids, Vocabulary(tokenizer))) == tokenizer.decode(ids)


def test_bytes_of_a_sentencepiece_character_wait_for_each_other() -> None:
    tokenizer = sentencepiece()
    assert deltas([257 - 1, *"中".encode()], Vocabulary(tokenizer)) == ["the", "", "", "中", ""]


def test_a_decoder_of_another_kind_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Vocabulary(tokenizer)


# ---- stop strings


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = watcher.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + watcher.end(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_stops_are_found_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert run_stops(stops, pieces) == expected(stops, "".join(pieces))


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.text("abc", max_size=30),
)
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    watcher, shown = StopStrings(stops), ""
    for at, character in enumerate(text):
        piece, stopped = watcher.feed(character)
        if stopped:
            break
        shown += piece
        held = text[len(shown) : at + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_stop_that_ends_an_answer_is_named(stops: list[str], pieces: list[str]) -> None:
    watcher, text = StopStrings(stops), "".join(pieces)
    for piece in pieces:
        if watcher.feed(piece)[1]:
            break
    shown, stopped = expected(stops, text)
    named = watcher.found
    assert (named in stops) if stopped else named is None
    assert named is None or text.startswith(shown + named)


def test_a_stop_split_over_tokens_is_never_shown() -> None:
    assert run_stops(["\n\nUser:"], ["Hello", "\n", "\nUs", "er", ": more"]) == ("Hello", True)


def test_what_was_held_back_in_vain_is_shown_at_the_end() -> None:
    assert run_stops(["STOP"], ["a ST", "O"]) == ("a STO", False)
