from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.plugins.tool_formats.formats import CHANNEL
from saccade.text.answer.reasoning import THINK, Reasoning, Tags, Where, reasoning_at


def split(where: Where, pieces: Sequence[str], tags: Tags = THINK) -> tuple[str, str]:
    reader = Reasoning(where, tags)
    read = [piece for text in pieces for piece in reader.feed(text)] + reader.end()
    reasoning = "".join(piece.text for piece in read if piece.reasoning)
    return reasoning, "".join(piece.text for piece in read if not piece.reasoning)


@pytest.mark.parametrize(
    ("where", "text", "reasoning", "answer"),
    [
        ("either", "<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("either", "\n <think></think>Yes.", "", "Yes."),
        ("either", "Yes <think>no</think>.", "", "Yes <think>no</think>."),
        ("either", "\n\nYes.", "", "\n\nYes."),
        ("either", "<thin", "", "<thin"),
        ("open", "Hm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        ("open", "\nHm.\n", "Hm.", ""),
        ("open", "Hm.\n</thin", "Hm.\n</thin", ""),
        ("open", "Hm</think>Yes</think>.", "Hm", "Yes</think>."),
        ("closed", "\n\nYes <think>.", "", "Yes <think>."),
    ],
)
def test_reasoning_is_told_apart(where: Where, text: str, reasoning: str, answer: str) -> None:
    assert split(where, [text]) == (reasoning, answer)
    assert split(where, list(text)) == (reasoning, answer)


@pytest.mark.parametrize(
    ("where", "text", "reasoning", "answer"),
    [
        ("either", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        ("either", "<|channel>thought\n<channel|>Yes.", "", "Yes."),  # of the large models
        ("either", "Yes.", "", "Yes."),
        ("either", "<|channel>tho", "", "<|channel>tho"),
        ("open", "Hm. </think>\n<channel|>Yes.", "Hm. </think>", "Yes."),
        ("open", "Hm.", "Hm.", ""),
    ],
)
def test_thoughts_of_gemma_4_are_told_apart(
    where: Where, text: str, reasoning: str, answer: str
) -> None:
    assert split(where, [text], CHANNEL) == (reasoning, answer)
    assert split(where, list(text), CHANNEL) == (reasoning, answer)


@given(
    st.sampled_from(["open", "closed", "either"]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "\n", " ", "a", "é", "<", "</", "think>"]),
        max_size=20,
    ).map("".join),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_any_split_gives_the_same(where: Where, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    reasoning, answer = split(where, pieces)
    assert (reasoning, answer) == split(where, [text])
    if where == "either" and text.lstrip().startswith("<think>"):
        where, text = "open", text.lstrip().removeprefix("<think>")
    if where == "open":
        text = text.replace("</think>", "", 1)
    assert (reasoning + answer).replace("\n", "") == text.replace("\n", "")


def test_text_streams_as_soon_as_it_is_certain() -> None:
    reader = Reasoning("open")
    assert [piece.text for piece in reader.feed("Hm. <")] == ["Hm. "]
    assert [piece.text for piece in reader.feed("b>")] == ["<b>"]
    assert [(p.text, p.reasoning) for p in reader.feed("</think>Yes")] == [("Yes", False)]


def test_a_prompt_says_where_it_leaves_the_model() -> None:
    assert reasoning_at("<|im_start|>assistant\n<think>\n") == "open"
    assert reasoning_at("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"
    assert reasoning_at("<think>x</think>y<|im_start|>assistant\n") == "either"
    assert reasoning_at("<|turn>model\n", CHANNEL) == "either"
    assert reasoning_at("<|turn>model\n<|channel>thought\n<channel|>", CHANNEL) == "closed"
    assert reasoning_at("<tool_response|><|channel>thought\n", CHANNEL) == "open"
