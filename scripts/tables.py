"""Writes the tables of docs/models.md from what each family says in its `facts.toml`. With
`--check` it writes nothing, and ends with 1 if a table is not current.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/models.md"
FACTS = sorted((ROOT / "saccade/families").rglob("facts.toml"))
COLUMNS = {
    "family": "models",
    "what differs": "differs",
    "prefix cache": "prefix_cache",
    "tensor parallel": "tensor_parallel",
}


def families() -> Iterator[list[str]]:
    """Yield the rows of families with networks of their own."""
    for path in FACTS:
        for row in tomllib.loads(path.read_text()).get("family", ()):
            yield [row[name] for name in COLUMNS.values()]


def architectures() -> Iterator[Sequence[str]]:
    """Yield the rows of what transformers' own modules serve."""
    for path in FACTS:
        for name, images in tomllib.loads(path.read_text()).get("images", {}).items():
            yield f"`{name}`", images


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text.replace("| --- ", "|---").replace("|  |", "| |")


def fill(page: str) -> str:
    """Put the tables in place of what stands between their marks."""
    tables = {
        "families": table([*COLUMNS], sorted(families())),
        "architectures": table(["architecture", "images"], [*architectures()]),
    }
    for name, text in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        assert mark and end, f"{PAGE} has no place for {name}"
        page = before + mark + text + end + after
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    before = PAGE.read_text()
    after = fill(before)
    if not parser.parse_args().check:
        PAGE.write_text(after)
    elif after != before:
        sys.exit("docs/models.md is not what the families say: run `python scripts/tables.py`")


if __name__ == "__main__":
    main()
