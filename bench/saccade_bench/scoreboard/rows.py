"""The rows of the scoreboard, as JSON files, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade_bench.prove.cases import CASES

KEPT, MIXED, UNJUDGED = "kept apart", "MIXED UP", "not judged"


@dataclass(frozen=True, slots=True)
class ScoredCase:
    """A case's verdict by each kind of evidence.

    read: by a model that reads the images, and by counts of tokens. cold: the numbers of answers
    that are their own cold answer, another image's, or undecided, or None if none were compared.
    repeated: for a mix-up, whether a fresh server gives the wrong answer again.
    requests: for a mix-up, the bodies that do so, in order.
    """

    read: str
    why: str
    cold: tuple[int, int, int] | None = None
    repeated: bool = False
    requests: tuple[dict[str, Any], ...] = ()

    @property
    def suspected(self) -> bool:
        return self.read == MIXED or bool(self.cold and self.cold[1])

    @property
    def wrong(self) -> bool:
        """A mix-up that anyone can repeat."""
        return self.suspected and self.repeated

    @property
    def passed(self) -> bool:
        """Cold answers alone do not suffice: a case that the model cannot read ends early."""
        return self.read == KEPT and not self.suspected


def combined(runs: Sequence[ScoredCase]) -> ScoredCase:
    """Return the worst of a case's results in several runs, with the sums of `cold`."""
    worst = max(runs, key=lambda each: (each.wrong, each.suspected, not each.passed))
    compared = [each.cold for each in runs if each.cold is not None]
    if not compared:
        return worst
    own, others, undecided = (sum(each[at] for each in compared) for at in range(3))
    return replace(worst, cold=(own, others, undecided))


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """An engine's results, and the command that gives them."""

    engine: str
    version: str
    date: str
    command: str
    seeds: tuple[int, ...]  # one per run
    cases: dict[str, ScoredCase]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.engine}.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_row(path: Path) -> ScoredRow:
    data = json.loads(path.read_text())
    cases = {
        name: ScoredCase(
            each["read"],
            each["why"],
            each["cold"] and tuple(each["cold"]),
            each["repeated"],
            tuple(each["requests"]),
        )
        for name, each in data.pop("cases").items()
    }
    return ScoredRow(**data | {"seeds": tuple(data["seeds"])}, cases=cases)


HEAD = """# Scoreboard

Which servers answer about the wrong image? Each row is a run of [`saccade prove`](safety.md) on an
engine that serves the demo model. Run one yourself:

```sh
python -m saccade_bench.scoreboard run llama.cpp --home ENVIRONMENTS
```

The command installs the engine in an environment in the folder ENVIRONMENTS, converts the model,
starts the engine with and without its caches, and writes a row as JSON.

With `--runs 3`, each run has new servers and new images, and the worst result of each case counts.

The table has two kinds of evidence. In a case that passed, the model read the right number in each
image, and the counts of prompt tokens agreed. `cold` compares the log-probabilities of each answer
with those that the same engine gives without caches. It counts the answers that match the same
request (own), a request about another image (other), or neither. This also works with a model that
cannot read the images.

A case is wrong only if a fresh server gives the wrong answer again. The row's JSON then has the
requests that reproduce it. If the wrong answer was not reproduced, the case is suspected. A case is
not judged if the engine lacks the feature, or if the model cannot read the images as the engine
decodes them. That says nothing about the engine's caches.

| engine, version, date | passed | wrong | suspected | not judged | cold: own / other / neither |
|---|---|---|---|---|---|
"""


def page(rows: Sequence[ScoredRow]) -> str:
    """Return the scoreboard in Markdown."""
    return HEAD + "".join(map(_line, rows)) + "".join(map(_details, rows))


def _line(row: ScoredRow) -> str:
    cases = row.cases.values()
    counts = (
        sum(each.passed for each in cases),
        sum(each.wrong for each in cases),
        sum(each.suspected and not each.wrong for each in cases),
        sum(not (each.passed or each.suspected) for each in cases),
    )
    compared = [each.cold for each in cases if each.cold is not None]
    cold = " / ".join(str(sum(each[at] for each in compared)) for at in range(3))
    cells = (f"{row.engine}, {row.version}, {row.date}", *counts, cold)
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _details(row: ScoredRow) -> str:
    differs = {case.name: case.differs for case in CASES}
    lines = [f"\n## {row.engine}\n\n```sh\n{row.command}\n```\n\n"]
    for name, each in row.cases.items():
        if each.passed:
            continue
        kind = "wrong" if each.wrong else "suspected" if each.suspected else UNJUDGED
        lines.append(f"- `{name}` ({differs[name]}): {kind}. {_escaped(each.why)}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
