"""Measure the English of docstrings and documents: `python -m saccade_bench.style`.

Reads source files alone and imports none of them. The figures are a help for the ear, not a test.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ("httpx", "starlette", "uvicorn")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NEGATIONS = frozenset(
    ["no", "not", "nobody", "nothing", "never", "none", "nowhere", "neither", "nor", "cannot"]
)
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
"""Verbs that docstrings here and elsewhere begin with, in their plain form."""


@dataclass(frozen=True, slots=True)
class Prose:
    """Texts, the docstrings among them that belong to functions, and what was counted."""

    texts: tuple[str, ...]
    functions: tuple[str, ...] = ()

    def verb_first(self) -> float:
        """Return the share of functions' docstrings that open with a verb."""
        return share(opens_with_verb(text) for text in self.functions)

    def per_thousand(self, words: Iterable[str]) -> float:
        """Return how often `words` stand among 1,000 words."""
        wanted, found = frozenset(words), self.words()
        return 1000 * sum(word in wanted for word in found) / max(1, len(found))

    def words(self) -> list[str]:
        return [word for text in self.texts for word in re.findall(r"[a-z']+", text.lower())]

    def sentences(self) -> list[str]:
        parts = (re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text) for text in self.texts)
        return [sentence for part in parts for sentence in part if len(sentence.split()) > 2]

    def sentence_words(self) -> float:
        sentences = self.sentences()
        return sum(len(each.split()) for each in sentences) / max(1, len(sentences))

    def sentence_commas(self) -> float:
        sentences = self.sentences()
        return sum(each.count(",") for each in sentences) / max(1, len(sentences))


def opens_with_verb(text: str) -> bool:
    """Return True if the first word is a verb: `Return`, and also `Returns`."""
    first = re.match(r"[A-Za-z]+", text)
    word = first[0].lower() if first else ""
    return word in VERBS or re.sub(r"(?<=[sxzo])es$|s$", "", word) in VERBS


def share(found: Iterable[bool]) -> float:
    each = list(found)
    return sum(each) / max(1, len(each))


def docstrings(path: Path) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield (node, line, text) of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node)
            if text:
                yield node, node.body[0].lineno, text


def prose_of_code(files: Iterable[Path]) -> Prose:
    """Read the docstrings of Python files, without code and tables."""
    found = [(node, plain(text)) for path in files for node, _, text in docstrings(path)]
    functions = tuple(text for node, text in found if isinstance(node, FUNCTIONS))
    return Prose(tuple(text for _, text in found), functions)


def prose_of_documents(files: Iterable[Path]) -> Prose:
    """Read the paragraphs of Markdown files, without code, tables, lists' marks and headings."""
    texts = []
    for path in files:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
        text = re.sub(r"^(\||#|<|!\[|- (Command|Machine|Date)).*$", "", text, flags=re.M)
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        texts += [plain(each) for each in re.split(r"\n\s*\n|^(?:-|\d+\.) ", text, flags=re.M)]
    return Prose(tuple(text for text in texts if text))


def plain(text: str) -> str:
    """Return a text on one line, with each piece of code as one word."""
    return " ".join(re.sub(r"`[^`]*`", "Code", text).split())


def rooms(root: Path) -> Iterator[tuple[str, Prose]]:
    """Yield each room of the product with its docstrings, then all of them."""
    package = root / "saccade"
    for room in sorted(path for path in package.iterdir() if path.is_dir()):
        if files := sorted(room.rglob("*.py")):
            yield room.name, prose_of_code(files)
    yield "saccade", prose_of_code(sorted(package.rglob("*.py")))


def peers() -> Iterator[tuple[str, Prose]]:
    """Yield the installed packages whose prose is a model for ours."""
    for name in PEERS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            yield name, prose_of_code(Path(spec.submodule_search_locations[0]).rglob("*.py"))


def report(root: Path) -> str:
    lines = ["docstrings      functions  verb first  of/1000  negations/1000"]
    for name, prose in (*rooms(root), *peers()):
        lines.append(
            f"{name:<16}{len(prose.functions):>9}{prose.verb_first():>12.0%}"
            f"{prose.per_thousand(['of']):>9.1f}{prose.per_thousand(NEGATIONS):>16.1f}"
        )
    lines += ["", "documents        words  words/sentence  commas/sentence  you/1000"]
    pages = sorted((root / "docs").glob("**/*.md"))
    records = root / "docs" / "decisions"
    documents = {
        "README": [root / "README.md"],
        "docs": [page for page in pages if records not in page.parents],
        "decisions": [page for page in pages if records in page.parents],
    }
    for name, files in documents.items():
        prose = prose_of_documents(files)
        lines.append(
            f"{name:<16}{len(prose.words()):>6}{prose.sentence_words():>16.1f}"
            f"{prose.sentence_commas():>17.2f}{prose.per_thousand(['you', 'your']):>10.1f}"
        )
    return "\n".join(lines)


def offenders(path: Path) -> Iterator[str]:
    """Yield functions' docstrings below `path` that open without a verb or with a long sentence."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node, line, text in docstrings(file):
            first = Prose((plain(text),)).sentences()
            long = bool(first) and len(first[0].split()) > 20
            if isinstance(node, FUNCTIONS) and (long or not opens_with_verb(text)):
                yield f"{file}:{line}: {' '.join(text.split())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", type=Path, metavar="PATH", help="list docstrings to rewrite")
    given = parser.parse_args()
    print("\n".join(offenders(given.list)) if given.list else report(ROOT))


if __name__ == "__main__":
    main()
