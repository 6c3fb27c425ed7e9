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


def page(rows: Sequence[ScoredRow]) -> str:
    """Return the scoreboard in Markdown."""
    text = Path(__file__).with_name("page.md").read_text()
    lines, details = ("".join(map(part, rows)) for part in (_line, _details))
    return text.replace("{rows}\n", lines) + details


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
