"""Shares of vague words in docstrings, by room: pronouns and place words, and docstrings that open
with a question word. `python -m saccade_bench.lab.prose [--list PATH]`.

Reads source files alone; imports none of them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
VAGUE = re.compile(
    r"\b(it|its|they|them|their|ones?|what|which|whose|whom?|there|here|this|that|these|those|others"
    r"|another|such)\b"
)
OPENING = re.compile(r"(What|Whether|Who|Where|Which|How|Why)\b")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def vague_words(text: str) -> tuple[int, int]:
    """(vague words, all words) of a text."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(VAGUE.fullmatch(word) is not None for word in words), len(words)


def report(root: Path = ROOT) -> str:
    """A table: room, docstrings, words, share of vague words, share of question openings."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for home in ("saccade", "bench/saccade_bench"):
        for path in sorted((root / home).rglob("*.py")):
            parts = path.relative_to(root / home).parts
            room = "bench" if home != "saccade" else parts[0]
            for _, text in docstrings(path):
                vague, words = vague_words(text)
                for name in (room, "saccade" if room != "bench" else "", ""):
                    added = (1, words, vague, bool(OPENING.match(text)))
                    counts[name] = [a + b for a, b in zip(counts[name], added)]
    counts["all"] = counts.pop("")
    lines = [
        f"{room:<16} {docs:>5} {words:>6} {vague / words:>6.1%} {opens / docs:>6.1%}"
        for room, (docs, words, vague, opens) in counts.items()
        if words
    ]
    return "\n".join(("room              docs  words  vague  opens", *lines))


def offenders(path: Path) -> str:
    """The docstrings of the files at `path` with vague words, each with its place."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = ((file, line, text) for file in files for line, text in docstrings(file))
    return "\n".join(
        f"{file}:{line}: {' '.join(text.split())}"
        for file, line, text in found
        if vague_words(text)[0] or OPENING.match(text)
    )


if __name__ == "__main__":
    print(offenders(Path(sys.argv[2])) if sys.argv[1:2] == ["--list"] else report())
