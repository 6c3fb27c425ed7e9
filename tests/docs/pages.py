"""The code blocks of README and of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
MARK = "<!-- run -->"
"""Stands above a block that a test runs."""
BLOCK = re.compile(rf"^({MARK}\n)?```(\w*)\n(.*?)^```", flags=re.S | re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, its language, and whether a test is to run it."""

    language: str
    text: str
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    for mark, language, text in BLOCK.findall(page.read_text()):
        yield Block(language, text, bool(mark))


def code(page: Path) -> Iterator[str]:
    """Yield each block and each piece of code within a line, on one line."""
    text = page.read_text()
    for block in blocks(page):
        yield from block.text.replace("\\\n", " ").splitlines()
    for piece in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        yield " ".join(piece.split())
