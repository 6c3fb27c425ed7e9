"""The house plan, enforced: who may import whom, how large things may grow, what imports without
torch.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
BESIDE = {"saccade_bench": ROOT / "bench", "train": ROOT}
"""Packages beside the server's, and the folders that hold them."""
RAY = PACKAGE / "route" / "ray.py"
"""Imports what only the extra `ray` brings."""
HOMES = {"saccade": ROOT, **BESIDE}
FILES = sorted(path for room, home in HOMES.items() for path in (home / room).rglob("*.py"))


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
    home = next(home for room, home in HOMES.items() if home / room in path.parents)
    parts = path.relative_to(PACKAGE if PACKAGE in path.parents else home).with_suffix("").parts
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
            if node.module in HOMES:
                rooms = [alias.name for alias in node.names if is_module(node.module, alias.name)]
                names = [f"{node.module}.{room}" for room in rooms] or names
        for name in names:
            if name.split(".")[0] in HOMES:
                inner = "__init__" if name == "saccade" else name.removeprefix("saccade.")
                yield inner, id(node) in top


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_module(package: str, name: str) -> bool:
    folder = HOMES[package] / package
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def fits(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_the_plan_allows(path: Path) -> None:
    module = module_name(path)
    may = next((targets for room, targets in ROWS if fits(module, room)), None)
    assert may is not None, f"{module} has no place in the plan: give it one in ARCHITECTURE.md"
    for target, top in imports(tree_of(path)):
        allowed = may if top else [*may, *CALLED.get(module, [])]
        assert any(fits(target, pattern) for pattern in allowed), (
            f"{module} may not import {target}"
        )


def test_no_modules_import_each_other() -> None:
    """Not in circles of any length, nor inside functions."""
    names = {module_name(path): path for path in FILES}
    ways = {
        name: {target for target, _ in imports(tree_of(path)) if target in names} - {name}
        for name, path in names.items()
    }
    while free := {name for name, targets in ways.items() if not targets}:
        ways = {name: targets - free for name, targets in ways.items() if name not in free}
    assert not ways, "these import each other, or what does"


def test_ray_is_imported_by_one_module_which_nothing_imports() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert "route.ray" not in {name for name, _ in imports(tree)}, path
        named = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert path == RAY or "ray" not in named, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600, "a file has at most 600 lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, (
                f"{node.name}: a function has at most 60 lines"
            )


# ---- classes


@cache
def classes() -> tuple[tuple[Path, ast.ClassDef], ...]:
    """Every class of ours, nested ones too."""
    return tuple(
        (path, node)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    )


def bases_of(path: Path, node: ast.ClassDef) -> list[tuple[Path, ast.ClassDef]]:
    """The bases that are ours."""
    ours = []
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        name = named.attr if isinstance(named, ast.Attribute) else ast.unparse(named)
        found = [each for each in classes() if each[1].name == name and each[1] is not node]
        # private names may recur: the one of the same file is meant
        ours += ([each for each in found if each[0] == path] or found)[:1]
    return ours


def declared_fields(node: ast.ClassDef) -> set[str]:
    return {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    }


def assigned_fields(node: ast.ClassDef, born: bool) -> set[str]:
    """Attributes of `self` that `__init__` assigns (`born`), or that the other methods do."""
    found = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        if (method.name == "__init__") != born:
            continue
        me = method.args.args[0].arg
        found |= {
            each.attr
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == me
        }
    return found


def fields_of(path: Path, node: ast.ClassDef) -> set[str]:
    """Declared or assigned by `__init__`, here or in a base of ours."""
    return declared_fields(node) | assigned_fields(node, born=True).union(
        *(fields_of(*base) for base in bases_of(path, node))
    )


def foreign_fields(path: Path, node: ast.ClassDef) -> set[str]:
    """What bases that are not ours declare or assign in their `__init__`."""
    name = module_name(path)
    module = importlib.import_module(f"saccade.{name}" if PACKAGE in path.parents else name)
    found = set()
    for base in getattr(module, node.name).__mro__:
        if base.__module__.split(".")[0] not in ("builtins", *HOMES):
            (theirs,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(theirs, ast.ClassDef)
            found |= declared_fields(theirs) | assigned_fields(theirs, born=True)
    return found


def test_a_class_has_few_fields_inherited_ones_counted() -> None:
    large = {
        f"{path.relative_to(ROOT)}: {node.name}": sorted(fields)
        for path, node in classes()
        if len(fields := fields_of(path, node)) > 15
    }
    assert not large, "a class has 15 fields at most"


def test_no_attribute_is_born_outside_init() -> None:
    """An attribute of a base that is not ours is born in that base's `__init__`."""
    found = {}
    for path, node in classes():
        late = assigned_fields(node, born=False) - fields_of(path, node)
        if late and (late := late - foreign_fields(path, node)):
            found[f"{path.relative_to(ROOT)}: {node.name}"] = sorted(late)
    assert not found, "an attribute is born in `__init__`"


def is_program(path: Path) -> bool:
    """Whether this is part of a measuring program, or of what they share with tests: each of
    them has names of its own."""
    return bool({"attacks", "fixtures", "gpu_check", "peers"} & {*path.parts}) or (
        ROOT / "bench" in path.parents and "__name__ ==" in path.read_text()
    )


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_") and not is_program(path):
            homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_house_rules_of_style(path: Path) -> None:
    tree = tree_of(path)
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
    "room", ["core", "media", "text", "front", "cache", "sched", "engine", "edge", "api", "route"]
)
def test_the_front_half_imports_without_torch(room: str) -> None:
    modules = [
        f"saccade.{module_name(path)}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.stem != "worker" and path != RAY
    ]
    load = f"import importlib, sys\nfor module in {modules!r}: importlib.import_module(module)"
    hostile = "'saccade.media.header', 'PIL.PngImagePlugin', 'PIL.AvifImagePlugin'"
    check = (
        "assert not {'torch', 'transformers'} & {*sys.modules}\n"
        f"assert {room == 'media'} or not {{{hostile}}} & {{*sys.modules}}, "
        "'bytes of images are parsed by image workers only'"
    )
    subprocess.run([sys.executable, "-c", f"{load}\n{check}"], check=True, cwd=ROOT)
