"""Names use the field's words: `glossary.txt` lists words to avoid, with their remaining uses."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def read_glossary() -> dict[str, tuple[int, str]]:
    """Return the maximum number of uses of each word, and what to write instead."""
    glossary = {}
    for line in (ROOT / "tests/glossary.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            word, uses, instead = line.split(maxsplit=2)
            glossary[word] = int(uses), instead
    return glossary


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from assigned_names(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr
    yield from assigned_names(tree.body)


def assigned_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.AnnAssign):
            targets: list[ast.expr] = [statement.target]
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        else:
            continue
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def find_uses(files: Iterable[tuple[str, str]], words: Iterable[str]) -> dict[str, list[str]]:
    """Return "file: name" of each definition in (file, text) whose name contains a word."""
    wanted, uses = set(words), defaultdict(list)
    for file, text in files:
        names = {Path(file).stem, *defined_names(ast.parse(text))}
        for name in sorted(names):
            for word in wanted & {part.lower() for part in WORD.findall(name)}:
                uses[word].append(f"{file}: {name}")
    return uses


def test_no_name_uses_a_word_that_the_glossary_replaces() -> None:
    glossary = read_glossary()
    paths = sorted(PACKAGE.rglob("*.py"))
    uses = find_uses(((str(path.relative_to(ROOT)), path.read_text()) for path in paths), glossary)
    for word, (limit, instead) in glossary.items():
        found = uses.get(word, [])
        assert len(found) <= limit, f"instead of {word!r} write {instead}:\n" + "\n".join(found)


def test_a_new_use_is_found() -> None:
    text = """
class KeptThing:
    told_by: int
    def __init__(self): self.door = self.walls = 1
    async def ask_nobody(self): pass
MOST, FEW = 1, 2
"""
    uses = find_uses(
        [("twin.py", text)], ["kept", "told", "door", "nobody", "most", "twin", "wall"]
    )
    assert uses == {
        "kept": ["twin.py: KeptThing"],
        "told": ["twin.py: told_by"],
        "door": ["twin.py: door"],
        "nobody": ["twin.py: ask_nobody"],
        "most": ["twin.py: MOST"],
        "twin": ["twin.py: twin"],
    }
