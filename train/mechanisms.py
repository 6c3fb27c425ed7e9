"""The demo model's accuracy with each of the server's mechanisms on and off: `python -m
train.mechanisms`.

A mechanism that is exact must not change an answer. One that rounds (bfloat16, 8 or 4 bits) may
change some, but must not lose more accuracy than the standard error. Tasks are the same as in
`train.evaluate`, with held-out seeds. Chats keep the model's own answers, so that caches are used
within a run. Each row is measured on a separate server.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from saccade_bench.drawn.tasks import SKILLS
from saccade_bench.fixtures.server import serving
from train.evaluate import Ask, ChatMessage, evaluate, http_asker

FLOAT32 = ("--dtype", "float32", "--quantization", "none")
BFLOAT16 = ("--dtype", "bfloat16", "--quantization", "none")
BASE = "float32, reference attention, no caches"
ROWS: Mapping[str, tuple[str, ...]] = {
    BASE: (
        *FLOAT32,
        *("--attention-backend", "reference", "--speculative", "off"),
        *("--tune", "disable_radix_cache=true", "--embedding-cache-device-mb", "1"),
    ),
    "float32": FLOAT32,
    "float32, the same again": FLOAT32,
    "float32, all images of a prompt encoded first": (*FLOAT32, "--tune", "chunk_aware=false"),
    "float32, steps of 64 tokens": (*FLOAT32, "--chunked-prefill-size", "64"),
    "float32, batch size 1": (*FLOAT32, "--max-running-requests", "1"),
    "float32, two ranks": (*FLOAT32, "--tp-size", "2"),
    "bfloat16": (*BFLOAT16, "--speculative", "off"),
    "bfloat16, draft tokens": (*BFLOAT16, "--speculative", "always"),
    "bfloat16, FP8 KV": (*BFLOAT16, "--kv-cache-dtype", "fp8_e4m3"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
    "int8, int8 vision encoder": (
        *("--dtype", "bfloat16", "--quantization", "int8"),
        *("--quantization-tower", "int8"),
    ),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
}
AGAIN = "float32, the same again"
"""Asks every question twice, and scores the second answers, for which everything is cached."""


@dataclass(frozen=True)
class Result:
    """The number of correct answers and of questions, and every answer by its question."""

    right: int
    count: int
    answers: Mapping[str, str]

    def row(self, name: str, base: Mapping[str, str]) -> str:
        share = self.right / self.count
        error = math.sqrt(share * (1 - share) / self.count)
        differ = sum(self.answers.get(asked) != answer for asked, answer in base.items())
        return f"| {name} | {100 * share:.1f} ± {100 * error:.1f} % | {differ} of {len(base)} |"


def recorded(ask: Ask, answers: dict[str, str]) -> Ask:
    """Return a wrapper of `ask` that adds each answer to `answers`, by its messages as JSON."""

    def asked(messages: list[ChatMessage]) -> str:
        key = json.dumps(messages)
        answers[key] = ask(messages)
        return answers[key]

    return asked


def measure(name: str, count: int, threads: int, scratch: Path) -> Result:
    """Score a server with the options of a row, with `count` tasks of each skill."""
    answers: dict[str, str] = {}
    with (
        serving("demo", scratch, *ROWS[name], threads=threads) as server,
        http_asker(server.url, None, None) as ask,
    ):
        for _ in range(1 + (name == AGAIN)):
            scores = evaluate(recorded(ask, answers), count, SKILLS)
    whole = [score for score in scores if " px" not in score.fonts]  # others are subsets of these
    right = sum(score.right for score in whole)
    return Result(right, sum(score.count for score in whole), answers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=100, help="tasks per skill")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the server")
    given = parser.parse_args()
    print("| | right | answers that differ from the first row |\n|---|---|---|")
    base: Mapping[str, str] = {}
    with TemporaryDirectory() as scratch:
        for name in given.only:
            result = measure(name, given.num_prompts, given.threads, Path(scratch))
            base = base or result.answers
            print(result.row(name, base), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
