"""OCRBench (Liu et al. 2023, arXiv 2305.07895): 1,000 questions about text in images.

The scoring rule reimplements the published evaluation (github.com/Yuliang-Liu/MultimodalOCR). An
answer is correct if it contains one of the expected texts, in lower case and with line breaks as
spaces. Handwritten formulae (HME100k) are compared case-sensitively and without spaces.
"""

from __future__ import annotations

import ast

from saccade.core.errors import ConfigError
from saccade_bench.eval.contract import Item
from saccade_bench.eval.records import Row, image_bytes, load_rows
from saccade_bench.eval.sampling import user_message

HUB = "echo840/OCRBench"
FORMULAE = ("HME100k", "Handwritten Mathematical Expression Recognition")


def items(source: str | None, count: int | None = None) -> list[Item]:
    """Return the first `count` questions of a file, a folder or the hub.

    Accepts the columns of the hub's data set and of the authors' JSON.
    """
    found: list[Item] = []
    for row, folder in load_rows(source or HUB):
        if len(found) == count:
            break
        encoded = image_bytes(row.get("image", row.get("image_path")), folder)
        if encoded is None or "question" not in row:
            raise ConfigError(f"{source or HUB}: a row has no question or no image")
        found.append(_item(str(row.get("id", len(found))), row, encoded))
    return found


def _item(name: str, row: Row, encoded: bytes) -> Item:
    answers = _answers(row.get("answers", row.get("answer")))
    kind = str(row.get("type", row.get("question_type", "all")))
    formula = str(row.get("dataset_name", row.get("dataset", ""))) in FORMULAE or kind in FORMULAE
    question = str(row["question"])
    return Item(
        id=f"ocrbench-{name}",
        group=kind,
        expected=" | ".join(answers),
        messages=lambda: [user_message([encoded, question])],
        score=lambda text: float(is_right(text, answers, formula)),
    )


def _answers(value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value.startswith("["):
        value = ast.literal_eval(value)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def is_right(text: str, answers: tuple[str, ...], formula: bool) -> bool:
    """Return True if the text contains one of the answers."""
    return any(_plain(answer, formula) in _plain(text, formula) for answer in answers)


def _plain(text: str, formula: bool) -> str:
    text = text.strip().replace("\n", " ")
    return text.replace(" ", "") if formula else text.lower()
