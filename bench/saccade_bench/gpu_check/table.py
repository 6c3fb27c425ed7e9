"""The table of GPU figures in the documentation: rows between two marks, each with its card's name.

Knows rows of text, not how figures came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

BEGIN, END = "<!-- gpu-check -->", "<!-- end of gpu-check -->"
HEAD = "| card | figure | measured | floor | published by others | when, commit |"
SHOWN = (
    *("tests failed", "copy", "products of bf16"),
    *("decode, *, batch 1", "decode, *, batch 64", "decode, *, batch 256", "prefill, *"),
    *("decode, *, batch 64, temperature *", "tower, *, best", "start of a server, *"),
    *("chat at *, TTFT of round 1", "chat at *, TTFT of round 8"),
    *("ITL of streams alone, median", "ITL P99 beside images", "probe at *"),
    *("tower attention, * rows, best", "paged prefill, * over *, best"),
)
"""Metrics that have a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Texts of its cells."""

    card: str
    figure: str
    measured: str
    floor: str
    published: str
    when: str


def is_shown(metric: str) -> bool:
    return any(fnmatchcase(metric, pattern) for pattern in SHOWN)


def fill(path: Path, rows: Sequence[Row]) -> None:
    """Put the rows into a text's table, in the places of those of the same card and figure. Raises
    ValueError for a text without the marks.
    """
    whole = path.read_text()
    if BEGIN not in whole or END not in whole:
        raise ValueError(f"{path} has no table: a line {BEGIN} and a line {END} mark one")
    before, rest = whole.split(BEGIN, 1)
    old, after = rest.split(END, 1)
    known = {(row.card, row.figure): row for row in (*_rows(old), *rows)}
    lines = [BEGIN, HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for row in sorted(known.values(), key=lambda each: each.card):
        lines.append(f"| {' | '.join(astuple(row))} |")
    body = "\n".join(lines)
    path.write_text(f"{before}{body}\n{END}{after}")


def _rows(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line != HEAD and len(cells) == HEAD.count("|") - 1 and not cells[0].startswith("---"):
            found.append(Row(*cells))
    return found
