"""Print the longest files, functions and classes of the package. There are no limits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from heapq import nlargest
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = 5


def measure(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, length, location). Files and functions have lines, classes fields."""
    text = path.read_text()
    place = path.relative_to(ROOT)
    yield "lines of a file", text.count("\n"), str(place)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield "lines of a function", lines, f"{place}: {node.name}"
        elif isinstance(node, ast.ClassDef):
            fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
            yield "fields of a class", fields, f"{place}: {node.name}"


def main() -> None:
    """Print the package's size, then the longest items of each kind."""
    paths = sorted((ROOT / "saccade").rglob("*.py"))
    found = [each for path in paths for each in measure(path)]
    total = sum(length for kind, length, _ in found if kind == "lines of a file")
    print(f"{total:,} lines in {len(paths)} files")
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        longest = nlargest(
            SHOWN, ((length, place) for each, length, place in found if each == kind)
        )
        print(f"{kind}: " + ", ".join(f"{length} ({place})" for length, place in longest))


if __name__ == "__main__":
    main()
