"""The interface of accuracy evaluations.

    sampler(messages) -> text        a model: takes OpenAI chat messages and returns the answer's
                                     text, or raises SampleError
    eval(sampler) -> EvalResult      number of items, mean score and its standard error

An eval is a sequence of `Item`s, which `grade` asks and scores. Scores are in [0, 1]. An item that
fails (SampleError) counts as wrong, and is asked again by the next run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EvalMessage = dict[str, Any]
Sampler = Callable[[list[EvalMessage]], str]
Progress = Callable[["GradedAnswer"], None]


class SampleError(Exception):
    """The model returned no answer. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `messages` builds its chat when it is asked, and `score` rates the answer from
    0 to 1.
    """

    id: str
    group: str
    expected: str
    messages: Callable[[], list[EvalMessage]]
    score: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """The answer to one item. `error` is set if there is no answer."""

    id: str
    group: str
    expected: str
    text: str
    score: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The number of items, their mean score and its standard error, the number of failed items, and
    the same for each group of items.
    """

    name: str
    n: int
    score: float
    stderr: float
    failed: int = 0
    groups: tuple[EvalResult, ...] = ()


Eval = Callable[[Sampler], EvalResult]


def grade(
    name: str,
    items: Sequence[Item],
    sampler: Sampler,
    concurrency: int = 1,
    journal: Path | None = None,
    told: Progress | None = None,
) -> EvalResult:
    """Ask all items and return their summary. See `ask_all` for `journal` and `told`."""
    return summarise(name, ask_all(items, sampler, concurrency, journal, told))


def ask_all(
    items: Sequence[Item],
    sampler: Sampler,
    concurrency: int = 1,
    journal: Path | None = None,
    told: Progress | None = None,
) -> list[GradedAnswer]:
    """Ask `concurrency` questions at a time, and return the answers in order of completion.

    Answers in `journal` are reused, and new ones are appended to it. `told` is called with each new
    answer.
    """
    known = (
        {answer.id: answer for answer in read_journal(journal) if answer.error is None}
        if journal
        else {}
    )
    answers = [known[item.id] for item in items if item.id in known]
    with ThreadPoolExecutor(concurrency) as pool:
        waiting = [pool.submit(_ask, item, sampler) for item in items if item.id not in known]
        for future in as_completed(waiting):
            answers.append(future.result())
            if journal:
                append(journal, asdict(answers[-1]))
            if told:
                told(answers[-1])
    return answers


def _ask(item: Item, sampler: Sampler) -> GradedAnswer:
    try:
        text = sampler(item.messages())
    except SampleError as error:
        return GradedAnswer(item.id, item.group, item.expected, "", 0.0, str(error))
    return GradedAnswer(item.id, item.group, item.expected, text, item.score(text))


def append(journal: Path, line: dict[str, Any]) -> None:
    """Append a line, after ending a line that a crash left incomplete."""
    cut = journal.exists() and not journal.read_bytes().endswith(b"\n")
    with journal.open("a") as file:
        file.write("\n" * cut + json.dumps(line) + "\n")


def read_journal(path: Path) -> list[GradedAnswer]:
    """Return the answers of an earlier run, or none if the file does not exist.

    A line that a crash left incomplete is skipped.
    """
    if not path.exists():
        return []
    answers = []
    for line in path.read_text().splitlines():
        try:
            answers.append(GradedAnswer(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return answers


def summarise(name: str, answers: Iterable[GradedAnswer]) -> EvalResult:
    """Return the mean and the standard error, over all answers and by group."""
    answers = list(answers)
    names = sorted({answer.group for answer in answers})
    groups = (
        tuple(_mean(group, [a for a in answers if a.group == group]) for group in names)
        if len(names) > 1
        else ()
    )
    whole = _mean(name, answers)
    return EvalResult(name, whole.n, whole.score, whole.stderr, whole.failed, groups)


def pool(name: str, results: Sequence[EvalResult]) -> EvalResult:
    """Combine results into one, as if their items had been scored together."""
    n, failed = sum(each.n for each in results), sum(each.failed for each in results)
    if n == 0:
        return EvalResult(name, 0, 0.0, 0.0)
    mean = sum(each.n * each.score for each in results) / n
    squares = sum(each.n * (each.n * each.stderr**2 + each.score**2) for each in results) / n
    return EvalResult(name, n, mean, math.sqrt(max(0.0, squares - mean**2) / n), failed)


def _mean(name: str, answers: Sequence[GradedAnswer]) -> EvalResult:
    """Return the mean of n scores and its standard error, sqrt(sum((s - mean)^2) / n / n)."""
    n = len(answers)
    if n == 0:
        return EvalResult(name, 0, 0.0, 0.0)
    mean = sum(answer.score for answer in answers) / n
    spread = sum((answer.score - mean) ** 2 for answer in answers) / n
    return EvalResult(
        name, n, mean, math.sqrt(spread / n), sum(answer.error is not None for answer in answers)
    )
