"""What Numba keeps to itself is used by one file, which was checked with the installed version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import saccade.plugins.cpu
from tests.helpers.processor import HAS_BACKEND

if not HAS_BACKEND:
    pytest.skip("only for x86-64, with Numba", allow_module_level=True)

FOLDER = Path(saccade.plugins.cpu.__path__[0])


def private_names(text: str) -> Iterator[str]:
    """Modules of `numba.core` that a source imports, and private names that it asks of objects."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numba.core"):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("numba.core"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield from [node.attr] * (ast.unparse(node.value) == "library")


def test_one_file_asks_for_what_numba_keeps_to_itself() -> None:
    found = {
        path.name: [*private_names(path.read_text())]
        for path in FOLDER.glob("*.py")
        if "numba" in path.read_text()
    }
    assert {name for name, names in found.items() if names} == {"jit.py"}
    assert {"_optimize_final_module", "_get_compiled_object"} <= {*found["jit.py"]}
    assert [*private_names("from numba.core import types\nlibrary._codegen")] == [
        "numba.core",
        "_codegen",
    ]


def test_the_installed_numba_is_the_one_that_was_checked() -> None:
    from saccade.plugins.cpu.jit import CHECKED_NUMBA

    installed = ".".join(version("numba").split(".")[:2])
    assert installed == CHECKED_NUMBA, (
        f"saccade/plugins/cpu/jit.py was checked with Numba {CHECKED_NUMBA}, not {installed}: "
        "run tests/plugins/cpu and the bit tests of tests/engine, read what changed in numba.core, "
        "then update CHECKED_NUMBA"
    )
