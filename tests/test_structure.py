"""The house plan, enforced: who may import whom, how large things may grow, what imports without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
FILES = sorted(PACKAGE.rglob("*.py"))

# Pattern of the importing module -> patterns of the modules of ours it may import. The first pattern that fits counts.
MAY_IMPORT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("saccade", ("saccade.*",)),
    ("saccade.__main__", ("saccade.*",)),
    (
        "saccade.llm",
        (
            "saccade.server.*",
            "saccade.intake.*",
            "saccade.engine.*",
            "saccade.core.*",
            "saccade.families.registry",
            "saccade.families.checkpoint",
        ),
    ),
    ("saccade.core.*", ("saccade.core.*",)),
    ("saccade.kernels.*", ("saccade.kernels.*",)),
    ("saccade.parallel", ("saccade.core.*",)),
    ("saccade.cache.*", ("saccade.core.*", "saccade.cache.*")),
    ("saccade.sched.*", ("saccade.sched.*", "saccade.cache.*", "saccade.core.*")),
    ("saccade.families.checkpoint", ("saccade.core.*",)),
    ("saccade.families.registry", ("saccade.core.*", "saccade.families.checkpoint", "saccade.families.*.spec")),
    ("saccade.families.*.config", ("saccade.core.*", "saccade.families.checkpoint")),
    ("saccade.families.*.spec", ("saccade.core.*", "saccade.families.checkpoint", "saccade.families.*.config")),
    ("saccade.families.*", ("saccade.nn.*", "saccade.kernels.*", "saccade.parallel", "saccade.core.*", "saccade.families.*")),
    ("saccade.nn.*", ("saccade.nn.*", "saccade.kernels.*", "saccade.parallel", "saccade.core.*")),
    (
        "saccade.intake.*",
        ("saccade.intake.*", "saccade.families.*.spec", "saccade.families.registry", "saccade.families.checkpoint", "saccade.core.*"),
    ),
    (
        "saccade.runtime.*",
        ("saccade.runtime.*", "saccade.families.*", "saccade.nn.*", "saccade.kernels.*", "saccade.parallel", "saccade.core.*"),
    ),
    # The engine's process is where the deciding and the computing halves are put together.
    (
        "saccade.engine.process",
        (
            "saccade.engine.*",
            "saccade.sched.*",
            "saccade.cache.*",
            "saccade.runtime.*",
            "saccade.families.*",
            "saccade.parallel",
            "saccade.core.*",
        ),
    ),
    ("saccade.engine.*", ("saccade.engine.*", "saccade.sched.*", "saccade.runtime.*", "saccade.parallel", "saccade.core.*")),
    (
        "saccade.server.*",
        (
            "saccade",  # its version
            "saccade.server.*",
            "saccade.intake.*",
            "saccade.engine.link",
            "saccade.core.*",
            "saccade.families.registry",
            "saccade.families.checkpoint",
        ),
    ),
    ("saccade.tools.*", ("saccade.tools.*", "saccade.core.*", "saccade.demo.draw", "saccade.demo.tasks")),
    ("saccade.demo.*", ("saccade.demo.*", "saccade.core.*")),
    # Measures our own code in its own process: it may import anything but the server.
    (
        "saccade.lab.*",
        (
            "saccade.lab.*",
            "saccade.tools.*",
            "saccade.intake.*",
            "saccade.engine.*",
            "saccade.runtime.*",
            "saccade.sched.*",
            "saccade.cache.*",
            "saccade.families.*",
            "saccade.nn.*",
            "saccade.kernels.*",
            "saccade.parallel",
            "saccade.core.*",
        ),
    ),
)
# Imports written inside a function of the registry: the nets are loaded only where there are tensors.
LAZY = {"saccade.families.registry": ("saccade.families.*", "saccade.nn.protocol", "saccade.parallel")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module of ours, whether it is imported at the top level at run time)."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names if alias.name.split(".")[0] == "saccade")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module and node.module.split(".")[0] == "saccade":
                yield node.module, id(node) in top


def allowed(module: str, target: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(target, pattern) or fnmatchcase(target + ".", pattern) for pattern in patterns) or target == module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_the_plan_allows(path: Path) -> None:
    module = module_name(path)
    patterns = next((may for pattern, may in MAY_IMPORT if fnmatchcase(module, pattern) or fnmatchcase(module + ".", pattern)), None)
    assert patterns is not None, f"{module} has no place in the plan: give it one in MAY_IMPORT and ARCHITECTURE.md"
    for target, top in imports(ast.parse(path.read_text())):
        extra = () if top else LAZY.get(module, ())
        assert allowed(module, target, patterns + extra), f"{module} may not import {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_functions_and_classes_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600, "a file has at most 600 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, f"{node.name}: a function has at most 60 lines"
        if isinstance(node, ast.ClassDef):
            assert count_fields(node) <= 15, f"{node.name}: a class has at most 15 fields"


def count_fields(node: ast.ClassDef) -> int:
    declared = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    assigned = {
        target.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for statement in ast.walk(method)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Attribute)
    }
    return max(len(declared), len(assigned))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_house_rules_of_style(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert path.stem not in {"utils", "common", "helpers", "manager", "base"}, "a name that says nothing"
    if path.stem != "__init__" or tree.body:
        assert ast.get_docstring(tree), "every file opens with what it owns"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), "no global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            assert len(node.args) < 3, "no feature probes by getattr with a default"


@pytest.mark.parametrize("room", ["core", "intake", "cache", "sched", "server"])
def test_the_front_half_imports_without_torch(room: str) -> None:
    modules = [module_name(path) for path in sorted((PACKAGE / room).rglob("*.py")) if path.stem != "decode_worker"]
    load = f"import importlib, sys\nfor module in {modules!r}: importlib.import_module(module)"
    check = "assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"{load}\n{check}"], check=True, cwd=ROOT)
