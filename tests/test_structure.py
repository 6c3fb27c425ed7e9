"""The house plan, enforced: who may import whom, how large things may grow, what imports without
torch.
"""

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
ROOMS_BESIDE = ("lab", "train")
FILES = sorted(path for room in ("saccade", *ROOMS_BESIDE) for path in (ROOT / room).rglob("*.py"))


def read_table() -> tuple[list[tuple[str, list[str]]], dict[str, list[str]]]:
    """ARCHITECTURE.md's import table: (room, what it may import), and the same for functions."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows, called = [], {}
    for line in text.split("```imports\n")[1].split("```")[0].splitlines():
        room, _, targets = line.partition("<-")
        may = [target.strip() for target in targets.split(",") if target.strip()]
        if room.startswith("called:"):
            called[room.removeprefix("called:").strip()] = may
        else:
            rows.append((room.strip(), [*may, room.strip()]))
    return rows, called


ROWS, CALLED = read_table()


def module_name(path: Path) -> str:
    """As the table has it: without `saccade.` in front."""
    parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module of ours as the table has it, whether it is imported at the top level)."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module] if node.module else []
            if node.module in ("saccade", *ROOMS_BESIDE):
                rooms = [alias.name for alias in node.names if is_module(node.module, alias.name)]
                names = [f"{node.module}.{room}" for room in rooms] or names
        for name in names:
            if name.split(".")[0] in ("saccade", *ROOMS_BESIDE):
                inner = name.removeprefix("saccade").removeprefix(".")
                yield inner or "__init__", id(node) in top


def is_module(package: str, name: str) -> bool:
    folder = ROOT / package
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def fits(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_the_plan_allows(path: Path) -> None:
    module = module_name(path)
    may = next((targets for room, targets in ROWS if fits(module, room)), None)
    assert may is not None, f"{module} has no place in the plan: give it one in ARCHITECTURE.md"
    for target, top in imports(ast.parse(path.read_text())):
        allowed = may if top else [*may, *CALLED.get(module, [])]
        assert any(fits(target, pattern) for pattern in allowed), (
            f"{module} may not import {target}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600, "a file has at most 600 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, (
                f"{node.name}: a function has at most 60 lines"
            )
        if isinstance(node, ast.ClassDef):
            assert count_fields(node) <= 15, f"{node.name}: a class has at most 15 fields"


def count_fields(node: ast.ClassDef) -> int:
    declared = {
        x.target.id
        for x in node.body
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }
    assigned = {
        target.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for statement in ast.walk(method)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        )
        if isinstance(target, ast.Attribute)
    }
    return max(len(declared), len(assigned))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_house_rules_of_style(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert path.stem not in {"utils", "common", "helpers", "manager", "base"}, (
        "a name that says nothing"
    )
    if path.stem != "__init__" or tree.body:
        assert ast.get_docstring(tree), "every file opens with what it owns"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), "no global"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
        ):
            assert len(node.args) < 3, "no feature probes by getattr with a default"


@pytest.mark.parametrize(
    "room", ["core", "media", "text", "front", "cache", "sched", "engine", "server"]
)
def test_the_front_half_imports_without_torch(room: str) -> None:
    modules = [
        f"saccade.{module_name(path)}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.stem != "worker"
    ]
    load = f"import importlib, sys\nfor module in {modules!r}: importlib.import_module(module)"
    hostile = "'saccade.media.header', 'PIL.PngImagePlugin', 'PIL.AvifImagePlugin'"
    check = (
        "assert not {'torch', 'transformers'} & {*sys.modules}\n"
        f"assert {room == 'media'} or not {{{hostile}}} & {{*sys.modules}}, "
        "'bytes of images are parsed by image workers only'"
    )
    subprocess.run([sys.executable, "-c", f"{load}\n{check}"], check=True, cwd=ROOT)
