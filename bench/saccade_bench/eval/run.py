"""`saccade eval`: accuracy of a model behind an OpenAI-compatible server.

An existing journal (--output-file) is resumed if it belongs to the same run, and rejected if not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.core.errors import ConfigError
from saccade_bench.counted import counted
from saccade_bench.eval import mmmu, ocr, ocrbench, shapes, video
from saccade_bench.eval.consistency import PASSES, consistency
from saccade_bench.eval.contract import EvalResult, GradedAnswer, Item, Sampler, append, grade
from saccade_bench.eval.sampling import HttpSampler
from saccade_bench.load.client import TIMEOUT, headers
from saccade_bench.load.workload import parse_extra
from saccade_bench.options import EvalName, EvalOptions, TargetOptions

QUESTIONS: dict[EvalName, Callable[[EvalOptions], list[Item]]] = {
    "ocr": lambda options: ocr.items(options.num_prompts or 200, options.seed),
    "shapes": lambda options: shapes.items(options.num_prompts or 200, options.seed),
    "ocrbench": lambda options: ocrbench.items(options.dataset_path, options.num_prompts),
    "mmmu": lambda options: mmmu.items(options.dataset_path, options.num_prompts),
    "consistency": lambda options: _mixed(options.num_prompts or 24, options.seed),
    "video": lambda options: video.items(options.num_prompts or 200, options.seed),
}
ANSWER_TOKENS: dict[EvalName, int] = {
    "ocr": 48,
    "shapes": 48,
    "ocrbench": 48,
    "mmmu": 1024,
    "consistency": 48,
    "video": 48,
}


def evaluate(name: EvalName, target: TargetOptions, options: EvalOptions) -> EvalResult:
    """Ask all questions, score the answers, and print the result. Raises ConfigError."""
    items = QUESTIONS[name](options)
    max_tokens = options.max_tokens or ANSWER_TOKENS[name]
    extra = parse_extra(target.extra_request_body)
    sampler = HttpSampler.connect(
        target.url, target.model, headers(target), max_tokens, extra, target.timeout or TIMEOUT
    )
    with closing(sampler.client):
        if options.output_file:
            open_journal(
                options.output_file,
                {"eval": name, "model": sampler.model, "max_tokens": max_tokens, "extra": extra},
            )
        result = _ask(name, items, sampler, options)
    if name == "mmmu":
        result = mmmu.with_domains(result)
    if options.output_file:
        append(options.output_file, {"result": asdict(result)})
    if not options.quiet:
        print_result(result)
    return result


def _ask(
    name: EvalName, items: Sequence[Item], sampler: Sampler, options: EvalOptions
) -> EvalResult:
    """Ask all questions with a progress bar that shows the accuracy so far."""
    scores: list[float] = []
    total = len(items) * (len(PASSES) if name == "consistency" else 1)
    with counted(name, total, quiet=options.quiet) as tell:

        def told(answer: GradedAnswer) -> None:
            scores.append(answer.score)
            tell(len(scores), f"{100 * sum(scores) / len(scores):.1f} % right so far")

        run = consistency if name == "consistency" else partial(grade, name)
        return run(items, sampler, options.concurrency, options.output_file, told)


def _mixed(count: int, seed: int) -> list[Item]:
    """Return half OCR and half shape questions."""
    return ocr.items(count // 2, seed) + shapes.items(count - count // 2, seed)


def open_journal(path: Path, head: dict[str, Any]) -> None:
    """Create a journal, or check that an existing one has the same eval, model and settings.

    Raises ConfigError if it does not.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")
        return
    first = path.read_text().partition("\n")[0]
    try:
        found = json.loads(first)
    except ValueError:
        found = None
    if found != head:
        raise ConfigError(
            f"{path} holds another run ({first[:200]}): name another --output-file, or remove it"
        )


def print_result(result: EvalResult) -> None:
    table = Table("eval", "n", "score", "std. error", "failed")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in (*result.groups, result):
        table.add_row(
            line.name,
            str(line.n),
            f"{line.score:.3f}",
            f"{line.stderr:.3f}",
            str(line.failed or "-"),
        )
        if line is not result and line is result.groups[-1]:
            table.add_section()
    Console(highlight=False).print(table)
