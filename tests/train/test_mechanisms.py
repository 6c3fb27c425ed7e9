"""Claims about the table of mechanisms on and off: what counts as another answer."""

import sys

import pytest

from train.evaluate import ChatMessage
from train.mechanisms import BASE, Result, main, recorded


def test_a_missing_answer_and_another_one_differ() -> None:
    base = {"[a]": "7", "[b]": "red", "[c]": "two"}
    result = Result(30, 40, {"[a]": "7", "[b]": "blue"})
    assert result.row("int4", base) == "| int4 | 75.0 ± 6.8 % | 2 of 3 |"


def test_answers_are_recorded_by_the_whole_chat() -> None:
    answers: dict[str, str] = {}
    ask = recorded(lambda messages: f"answer {len(messages)}", answers)
    first: ChatMessage = {"role": "user", "content": "What number?"}
    assert ask([first]) == "answer 1" and ask([first, first]) == "answer 2"
    assert list(answers.values()) == ["answer 1", "answer 2"]


@pytest.mark.slow
def test_an_exact_mechanism_changes_no_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (BASE, "float32, the same again")
    monkeypatch.setattr(sys, "argv", ["mechanisms", "--num-prompts", "1", "--only", *rows])
    assert main() == 0
    first, again = [
        line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| f")
    ]
    assert first[2] == again[2], "the same answers are right"
    differ, _, asked = again[3].split()
    assert differ == "0" and int(asked) > 10
