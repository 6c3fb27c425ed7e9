"""Write the tables of documents: docs/models.md from each family's `facts.toml`, docs/options.md
and docs/api.md from the code. With `--check`, write nothing, and exit with 1 if a table is
outdated.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from saccade.commands import SERVE_OPTIONS, TUNING
from saccade.core.field_docs import field_docs
from saccade.core.tuning import option
from saccade.plugins import plugins
from saccade.plugins.docs.openapi import describe
from saccade.tools.foreign_options import ENVIRONMENT
from saccade.tools.foreign_options import OPTIONS as FOREIGN

ROOT = Path(__file__).parent.parent
FACTS = sorted((ROOT / "saccade").rglob("facts.toml"), key=lambda path: path.parent.name)
COLUMNS = {
    "family": "models",
    "what differs": "differs",
    "prefix cache": "prefix_cache",
    "tensor parallel": "tensor_parallel",
}


def families() -> Iterator[list[str]]:
    """Yield the rows of families with their own networks."""
    for path in FACTS:
        for row in tomllib.loads(path.read_text()).get("family", ()):
            yield [row[name] for name in COLUMNS.values()]


def architectures() -> Iterator[Sequence[str]]:
    """Yield the rows of architectures that are served through transformers' modules."""
    for path in FACTS:
        for name, images in tomllib.loads(path.read_text()).get("images", {}).items():
            yield f"`{name}`", images


def options() -> Iterator[Sequence[str]]:
    """Yield name, default and meaning of each option of `saccade serve`."""
    for kind in SERVE_OPTIONS:
        meanings = field_docs(kind)
        for field in dataclasses.fields(kind):
            if field.name not in TUNING:
                yield f"`{option(field.name)}`", shown(field.default), meanings[field.name]


def tuning_values() -> Iterator[Sequence[str]]:
    """Yield name, default and meaning of each value of `--tune`."""
    for name, value in sorted(TUNING.items()):
        yield f"`{name}`", shown(value.default), value.meaning


def foreign() -> Iterator[Sequence[str]]:
    """Yield each option of another server, and its equivalent here."""
    for name, each in FOREIGN.items():
        here = each.instead or f"`{' '.join(each.ours)}`"
        if each.unneeded:
            here = f"not needed: {each.unneeded}"
        yield f"`{name}`", here.replace("{}", "VALUE")


def paths() -> Iterator[Sequence[str]]:
    """Yield path, methods and summary of the paths in /openapi.json."""
    for path, operations in describe(plugins())["paths"].items():
        summaries = dict.fromkeys(each["summary"] for each in operations.values())
        yield f"`{path}`", ", ".join(map(str.upper, operations)), ". ".join(summaries)


def shown(default: object) -> str:
    return "" if default in (None, (), "") else f"`{default}`"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    safe = ([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows)
    lines = [columns, ["---"] * len(columns), *safe]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text.replace("| --- ", "|---").replace("|  |", "| |")


def fill(page: str, tables: dict[str, str]) -> str:
    """Replace the text between the tables' markers in a page."""
    for name, text in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        assert mark and end, f"a page has no place for {name}"
        page = before + mark + text + end + after
    return page


PAGES = {
    "docs/models.md": {
        "families": table([*COLUMNS], sorted(families())),
        "architectures": table(["architecture", "images"], [*architectures()]),
    },
    "docs/api.md": {"paths": table(["Path", "Methods", "What it does"], [*paths()])},
    "docs/coming-from.md": {
        "foreign options": table(["Theirs", "Here"], [*foreign()]),
        "foreign variables": table(
            ["Theirs", "Here"], [(f"`{name}`", what) for name, what in ENVIRONMENT.items()]
        ),
    },
    "docs/options.md": {
        "options": table(["Option", "Default", "Meaning"], [*options()]),
        "tuning values": table(["Value", "Default", "Meaning"], [*tuning_values()]),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, tables in PAGES.items():
        page = ROOT / name
        before = page.read_text()
        after = fill(before, tables)
        if not check:
            page.write_text(after)
        elif after != before:
            sys.exit(f"{name} is not what the code says: run `python scripts/tables.py`")


if __name__ == "__main__":
    main()
