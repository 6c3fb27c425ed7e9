"""MMMU (Yue et al. 2023, arXiv 2311.16502): college-level questions with images; multiple-choice or
open answers.

The scoring rules reimplement the published evaluation (github.com/MMMU-Benchmark/MMMU, eval). As in
that evaluation, an answer without a recognizable choice is scored as a random one, which depends
only on the question's id.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass, replace

from saccade.core.errors import ConfigError
from saccade_bench.eval.contract import EvalResult, Item, pool
from saccade_bench.eval.records import Row, image_bytes, load_rows
from saccade_bench.eval.sampling import user_message

HUB = "MMMU/MMMU"
SPLIT = "**/validation-*.parquet"

DOMAINS = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        *("Basic_Medical_Science", "Clinical_Medicine", "Pharmacy", "Public_Health"),
        "Diagnostics_and_Laboratory_Medicine",
    ),
    "Humanities and Social Science": ("History", "Literature", "Psychology", "Sociology"),
    "Tech and Engineering": (
        *("Agriculture", "Architecture_and_Engineering", "Computer_Science", "Electronics"),
        *("Energy_and_Power", "Materials", "Mechanical_Engineering"),
    ),
}
"""The six domains of the publication, and the subjects of each."""
CHOICE_PROMPT = "Answer with the option's letter from the given choices directly."
OPEN_PROMPT = "Answer the question using a single word or phrase."

CLUES = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
"""Phrases that precede the answer in a sentence. In the last sentence, "=" is one, too."""
NUMBERS = (  # with thousands separators; in scientific notation; plain
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question, which is open if `options` is empty. `answers` is a letter or correct texts."""

    id: str
    question: str
    options: tuple[str, ...]
    answers: tuple[str, ...]
    images: tuple[bytes, ...]

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(chr(ord("A") + i) for i in range(len(self.options)))

    @property
    def subject(self) -> str:
        return "_".join(self.id.split("_")[1:-1]) or "all"

    def parts(self) -> list[str | bytes]:
        """Return the prompt, with images in the positions of `<image k>`."""
        lines = [
            self.question,
            *(
                f"({letter}) {option}"
                for letter, option in zip(self.letters, self.options, strict=True)
            ),
        ]
        lines.append(CHOICE_PROMPT if self.options else OPEN_PROMPT)
        parts: list[str | bytes] = []
        for piece in re.split(r"(<image \d+>)", "\n".join(lines)):
            number = int(piece[7:-1]) if re.fullmatch(r"<image \d+>", piece) else 0
            if 0 < number <= len(self.images):
                parts.append(self.images[number - 1])
            elif piece.strip():
                parts.append(piece.strip("\n"))
        return parts


def load_questions(source: str | None) -> list[Question]:
    """Load questions from a file, a folder or the hub (default: the hub's validation split).

    Raises ConfigError.
    """
    questions = []
    for row, folder in load_rows(source or HUB, SPLIT):
        try:
            questions.append(
                _question(
                    row,
                    tuple(
                        filter(
                            None,
                            (image_bytes(row.get(f"image_{k}"), folder) for k in range(1, 8)),
                        )
                    ),
                )
            )
        except (KeyError, ValueError, SyntaxError) as error:
            raise ConfigError(
                f"{source or HUB}: a row is not an MMMU question: {error!r}"
            ) from None
    return questions


def _question(row: Row, images: tuple[bytes, ...]) -> Question:
    options = _listed(row.get("options") or [])
    answers = (str(row["answer"]),) if options else _listed(row["answer"])
    return Question(str(row["id"]), str(row["question"]), options, answers, images)


def _listed(value: object) -> tuple[str, ...]:
    """Parse a list, which the hub stores as a Python literal."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = ast.literal_eval(value)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def items(source: str | None, count: int | None = None) -> list[Item]:
    """Return the first `count` questions as items of an eval."""
    return [_item(question) for question in load_questions(source)[:count]]


def with_domains(result: EvalResult) -> EvalResult:
    """Return the result with an additional group for each domain, as in the publication."""
    sums = (
        pool(f"Overall-{name}", [each for each in result.groups if each.name in subjects])
        for name, subjects in DOMAINS.items()
    )
    return replace(result, groups=(*result.groups, *(each for each in sums if each.n)))


def _item(question: Question) -> Item:
    return Item(
        id=question.id,
        group=question.subject,
        expected=" | ".join(question.answers),
        messages=lambda: [user_message(question.parts())],
        score=lambda text: float(is_right(question, text)),
    )


def is_right(question: Question, response: str) -> bool:
    if question.options:
        return (
            parse_choice(response, question.letters, question.options, question.id)
            in question.answers
        )
    return is_open_right(question.answers, parse_open(response))


def parse_choice(
    response: str, letters: tuple[str, ...], options: tuple[str, ...], seed: str = ""
) -> str:
    """Return the chosen letter.

    This is the last one written as `(A)`, or else as ` A `, or else as `A.`, or else the letter of
    the option whose text comes last in an answer of more than five words, or else a random one.
    """
    text = response
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    for form in ("({})", "{} ", "{}."):
        found = [letter for letter in letters if form.format(letter) in text]
        if found:
            # As published: `(A)` is located with its brackets, the other two forms by ` A `.
            place = "({})" if form == "({})" else " {} "
            return max(found, key=lambda letter: text.rfind(place.format(letter)))
    if len(text.split()) > 5:
        lower = text.lower()
        named = [
            (lower.rfind(option.lower()), letter)
            for letter, option in zip(letters, options, strict=True)
            if option.lower() in lower
        ]
        if named:
            return max(named, key=lambda pair: pair[0])[1]
    return random.Random(f"mmmu {seed}").choice(letters)


def parse_open(response: str) -> set[str | float]:
    """Return the candidates in an open answer: the text after a clue in each sentence, and every
    number in it.
    """
    text = response.strip().strip(".").lower()
    sentences = re.split(r"\.\s(?=[A-Z])|\n", text)
    keys = []
    for place, sentence in enumerate(sentences):
        clues = (*CLUES, "=") if place == len(sentences) - 1 else CLUES
        tails = [sentence.split(clue)[-1].strip() for clue in clues if clue in sentence]
        shortest = min(tails, key=len, default="")
        if shortest and shortest not in set(":,.!?;'"):
            keys.append(shortest)
    keys = keys or [text]
    said = keys + [number for key in keys for form in NUMBERS for number in form.findall(key)]
    return {form for piece in said for form in normalise(piece)}


def normalise(text: str) -> tuple[str | float, ...]:
    """Return a number rounded to two decimals, or else the text in lower case.

    A single character is returned with a space before or after it, so that it does not match
    within words.
    """
    text = text.strip()
    try:
        return (round(float(text.replace(",", "")), 2),)
    except ValueError:
        lower = text.lower()
        return (f" {lower}", f"{lower} ") if len(lower) == 1 else (lower,)


def is_open_right(answers: tuple[str, ...], said: set[str | float]) -> bool:
    """Return True if a candidate contains a correct text, or equals a correct number."""
    right = {form for answer in answers for form in normalise(answer)}
    texts = [form for form in right if isinstance(form, str)]
    return any(
        any(text in piece for text in texts) if isinstance(piece, str) else piece in right
        for piece in said
    )
