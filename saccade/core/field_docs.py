"""Reads the help of options and API fields from the docstrings below dataclass fields."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from threading import Lock

OURS = __name__.partition(".")[0]
_PARSING = Lock()
"""Allows one thread at a time to parse. Python 3.11 counts the recursion depth of parsers in all
threads together, so concurrent parsing can fail (python/cpython#106905).
"""


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class by field name, including fields of base
    classes.
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.partition(".")[0] == OURS:
            found |= _module_docs(each.__module__)[each.__name__]
    return found


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    source = inspect.getsource(sys.modules[module])
    with _PARSING:
        tree = ast.parse(source)
    return {
        each.name: _class_docs(each) for each in ast.walk(tree) if isinstance(each, ast.ClassDef)
    }


def _class_docs(tree: ast.ClassDef) -> dict[str, str]:
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(words.value).split())
        for field, words in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr)
    }
