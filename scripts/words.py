"""Count words in the project's prose, per 1,000 words.

`words.py` prints a table, `words.py GROUP [PATH]` the lines that use a group's words. Some groups
have words that read like a translation if they are frequent. Others have the field's own words, for
comparison. No test depends on a count.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GROUPS = {
    "tell": "tell tells told telling say says said saying",
    "lie": "lie lies lying lain stand stands stood standing",
    "nobody": "nobody nothing",
    "come": "come comes came coming go goes went gone going",
    "beside": "beside",
    "return": "return returns returned",
    "use": "use uses used using",
    "default": "default defaults",
}
GROUP_OF = {word: group for group, words in GROUPS.items() for word in words.split()}
WORD = re.compile(r"[A-Za-z']+")
CODE = re.compile(r"```.*?```", re.DOTALL)

Line = tuple[Path, int, str]


def read_module(path: Path) -> Iterator[Line]:
    """Yield the lines of a module's docstrings and comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            for index, line in enumerate(text.splitlines()):
                yield path, node.body[0].lineno + index, line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield path, token.start[0], token.string


def read_page(path: Path) -> Iterator[Line]:
    """Yield the lines of a Markdown page without its code blocks."""
    text = CODE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    for index, line in enumerate(text.splitlines(), 1):
        yield path, index, line


def read_messages(path: Path) -> Iterator[Line]:
    """Yield the strings of a module that are sentences: errors, help texts, log lines."""
    tree = ast.parse(path.read_text())
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and node.value.count(" ") > 1
        ):
            yield path, node.lineno, " ".join(node.value.split())


def read_all() -> dict[str, list[Line]]:
    """Return the lines of each kind of prose."""
    modules = sorted((ROOT / "saccade").rglob("*.py"))
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    pages += sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    return {
        "code": [line for path in modules for line in read_module(path)],
        "messages": [line for path in modules for line in read_messages(path)],
        "docs": [line for path in pages for line in read_page(path)],
        "decisions": [line for path in decisions for line in read_page(path)],
    }


def count(lines: Iterable[Line]) -> tuple[int, Counter[str]]:
    """Return the number of words, and how many belong to each group."""
    words = [word.lower() for _, _, line in lines for word in WORD.findall(line)]
    return len(words), Counter(GROUP_OF[word] for word in words if word in GROUP_OF)


def main() -> None:
    """Print a table of rates, or the lines that use a group's words."""
    prose = read_all()
    if len(sys.argv) > 1:
        group, under = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
        for path, number, line in (line for lines in prose.values() for line in lines):
            name = str(path.relative_to(ROOT))
            if under in name and count([(path, number, line)])[1][group]:
                print(f"{name}:{number}: {line.strip()}")
        return
    print("".join(f"{name:>10}" for name in ["", "words", *GROUPS]))
    for kind, lines in prose.items():
        total, counts = count(lines)
        rates = "".join(f"{1000 * counts[group] / total:10.2f}" for group in GROUPS)
        print(f"{kind:>10}{total:10,}{rates}")


if __name__ == "__main__":
    main()
