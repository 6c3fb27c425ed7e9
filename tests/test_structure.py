"""The house plan, enforced: who may import whom, and what imports without torch. Each rule lists
all offenders at once, and is shown one that was planted for it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

import msgspec
import pytest

from saccade.api.restraint import Restraint
from saccade.families.registry import families

pytestmark = pytest.mark.slow  # in `make check`

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
NEIGHBOURS = {"saccade_bench": ROOT / "bench", "train": ROOT}
"""Packages next to the server's, and the folders that hold them."""
RAY = PACKAGE / "route" / "ray.py"
"""Imports what only the extra `ray` brings."""
HOMES = {"saccade": ROOT, **NEIGHBOURS}


@dataclass(frozen=True)
class Source:
    """A file of ours, or one that a test has planted."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        """As tests/imports.txt has it: without `saccade.` in front."""
        home = next(home for room, home in HOMES.items() if home / room in self.path.parents)
        inner = self.path.relative_to(PACKAGE if PACKAGE in self.path.parents else home)
        parts = inner.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = [
    Source(path, path.read_text())
    for path in sorted(path for room, home in HOMES.items() for path in (home / room).rglob("*.py"))
]


def planted(place: str, text: str) -> list[Source]:
    return [Source(PACKAGE / place, textwrap.dedent(text))]


def offenders(
    check: Callable[[Source], Iterable[str]], sources: Sequence[Source] = FILES
) -> list[str]:
    return [f"{source.name}: {each}" for source in sources for each in check(source)]


def read_table() -> tuple[list[tuple[str, list[str]]], dict[str, list[str]]]:
    """Return (package, what it may import) of each line, and the same for functions."""
    rows, called = [], {}
    for line in (ROOT / "tests/imports.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        room, _, targets = line.partition("<-")
        may = [target.strip() for target in targets.split(",") if target.strip()]
        if room.startswith("called:"):
            called[room.removeprefix("called:").strip()] = may
        else:
            rows.append((room.strip(), [*may, room.strip()]))
    return rows, called


ROWS, CALLED = read_table()


def imports(source: Source) -> Iterator[tuple[str, bool]]:
    """(module of ours as tests/imports.txt has it, whether it is imported at the top level)."""
    top = set(map(id, source.tree.body))
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module] if node.module else []
            if node.module and node.module.split(".")[0] in HOMES:
                rooms = [alias.name for alias in node.names if is_module(node.module, alias.name)]
                names = [f"{node.module}.{room}" for room in rooms] or names
        for name in names:
            if name.split(".")[0] in HOMES:
                inner = "__init__" if name == "saccade" else name.removeprefix("saccade.")
                yield inner, id(node) in top


@cache
def is_module(package: str, name: str) -> bool:
    folder = HOMES[package.split(".")[0]].joinpath(*package.split("."))
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def fits(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def bound(pattern: str, module: str) -> str:
    """`~` is the module's own folder within its room."""
    return pattern.replace("~", [*module.split("."), ""][1])


def foreign_imports(source: Source) -> Iterator[str]:
    """Imports that the plan does not allow to a file."""
    module = source.module
    may = next(
        (
            [bound(target, module) for target in targets]
            for room, targets in ROWS
            if fits(module, bound(room, module))
        ),
        None,
    )
    if may is None:
        yield "has no place in the plan: give it a line in tests/imports.txt"
        return
    for target, top in imports(source):
        allowed = may if top else [*may, *CALLED.get(module, [])]
        if not any(fits(target, pattern) for pattern in allowed):
            yield f"may not import {target}"


def test_a_module_imports_only_what_the_plan_allows() -> None:
    assert not offenders(foreign_imports)
    assert offenders(
        foreign_imports,
        planted(
            "core/new.py", "from saccade.engine import engine\n\ndef f():\n    import saccade.api"
        ),
    ) == [
        "saccade/core/new.py: may not import engine.engine",
        "saccade/core/new.py: may not import api",
    ]
    (placeless,) = offenders(foreign_imports, planted("attic/new.py", ""))
    assert "has no place in the plan" in placeless


def named_plugins(source: Source) -> Iterator[str]:
    """Plugins that a file outside their folder imports or writes as a dotted name."""
    own = ".".join(source.module.split(".")[:2])
    names = {name for name, _ in imports(source)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {name.removeprefix("saccade.") for name in re.findall(DOTTED, node.value)}
    for name in sorted(names):
        if name.startswith("plugins.") and not fits(name, own):
            yield f"names {name}"


DOTTED = re.compile(r"\bsaccade\.plugins\.[\w.]+")


def test_shared_code_names_no_plugin() -> None:
    assert not offenders(named_plugins, [each for each in FILES if PACKAGE in each.path.parents])
    named = """
        from saccade.plugins import messages
        ROUTES = "saccade.plugins.batches.handlers:batch_routes"
    """
    for place in ("api/new.py", "plugins/files/__init__.py"):
        found = offenders(named_plugins, planted(place, named))
        assert len(found) == 2 and "plugins.messages" in found[1], found
    assert not offenders(named_plugins, planted("plugins/batches/new.py", named.splitlines()[2]))


def nested(paths: Iterable[Path]) -> list[str]:
    """Folders of model families within another's."""
    home = PACKAGE / "families"
    folders = {path.relative_to(home).parent for path in paths if home in path.parents}
    return sorted(str(folder) for folder in folders if len(folder.parts) > 1)


def test_no_family_imports_another() -> None:
    """What several share is in `families/kit/`."""
    text = "from saccade.families.qwen_vl import images\nfrom saccade.families.kit import hybrid"
    for folder in ("gemma3", "kit"):
        assert offenders(foreign_imports, planted(f"families/{folder}/new.py", text)) == [
            f"saccade/families/{folder}/new.py: may not import families.qwen_vl.images"
        ]
    assert not nested(source.path for source in FILES)
    assert nested([PACKAGE / "families/qwen_vl/dots_ocr/net.py"]) == ["qwen_vl/dots_ocr"]


def uses_of_ray(source: Source) -> Iterator[str]:
    if "route.ray" in {name for name, _ in imports(source)}:
        yield "imports route.ray"
    for node in source.nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if source.path != RAY and "ray" in {name.split(".")[0] for name in names}:
            yield "imports ray"


def in_circles(sources: Sequence[Source]) -> set[str]:
    """Modules that import each other, through any number of others or inside functions; and those
    that import such.
    """
    names = {source.module for source in sources}
    ways = {
        source.module: {target for target, _ in imports(source)} & names - {source.module}
        for source in sources
    }
    while free := {name for name, targets in ways.items() if not targets}:
        ways = {name: targets - free for name, targets in ways.items() if name not in free}
    return set(ways)


def test_no_modules_import_each_other() -> None:
    assert not in_circles(FILES)
    back = planted("kernels/reference/norm.py", "def f():\n    import saccade.kernels.ops")
    rest = [source for source in FILES if source.module != "kernels.reference.norm"]
    assert {"kernels.ops", "kernels.reference.norm"} <= in_circles([*rest, *back])


def test_ray_is_imported_by_one_module_which_nothing_imports() -> None:
    assert not offenders(uses_of_ray)
    text = "def f():\n    import ray.serve\n    from saccade.route import ray"
    assert offenders(uses_of_ray, planted("route/new.py", text)) == [
        "saccade/route/new.py: imports route.ray",
        "saccade/route/new.py: imports ray",
    ]


def uses_of_bench(source: Source) -> Iterator[str]:
    """Imports of the packages next to the server's by its own modules."""
    if PACKAGE in source.path.parents:
        for name, _ in imports(source):
            if name.split(".")[0] in NEIGHBOURS:
                yield f"imports {name}"


def test_no_module_of_the_server_imports_the_bench() -> None:
    """Nor the fixtures in it: its wheel is installed without them."""
    assert not offenders(uses_of_bench)
    text = "def f():\n    from saccade_bench.fixtures import tiny"
    assert offenders(uses_of_bench, planted("commands.py", text)) == [
        "saccade/commands.py: imports saccade_bench.fixtures.tiny"
    ]


# ---- classes


@dataclass(frozen=True)
class Class:
    """A class of ours, nested or not, and all those that it may inherit from."""

    source: Source
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.source.name}: {self.node.name}"


def classes_of(sources: Sequence[Source]) -> list[Class]:
    return [
        Class(source, node)
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    ]


class Classes:
    """All classes of `sources`, and who inherits what from whom."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.all = classes_of(sources)
        self._named: dict[str, list[Class]] = {}
        for each in self.all:
            self._named.setdefault(each.node.name, []).append(each)

    def bases(self, of: Class) -> list[Class]:
        """The bases that are ours."""
        ours = []
        for base in of.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            name = named.attr if isinstance(named, ast.Attribute) else ast.unparse(named)
            found = [each for each in self._named.get(name, []) if each.node is not of.node]
            # private names may recur: the one of the same file is meant
            ours += ([each for each in found if each.source is of.source] or found)[:1]
        return ours

    def fields(self, of: Class) -> set[str]:
        """Declared or assigned by `__init__`, here or in a base of ours."""
        return declared_fields(of.node) | assigned_fields(of.node, born=True).union(
            *(self.fields(base) for base in self.bases(of))
        )

    def late(self) -> dict[str, set[str]]:
        """Attributes that are born outside `__init__`."""
        found = {}
        for each in self.all:
            late = assigned_fields(each.node, born=False) - self.fields(each)
            if late and (late := late - foreign_fields(each)):
                found[each.name] = late
        return found

    def doubles(self) -> list[list[str]]:
        """Public classes, but those of programs, that have a name in common."""
        public = [
            [each.name for each in them if not is_program(each.source)]
            for name, them in self._named.items()
            if not name.startswith("_")
        ]
        return [them for them in public if len(them) > 1]


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


def foreign_fields(of: Class) -> set[str]:
    """What bases that are not ours declare or assign in their `__init__`."""
    if not of.node.bases:
        return set()
    module = of.source.module
    name = f"saccade.{module}" if PACKAGE in of.source.path.parents else module
    found = set()
    for base in getattr(importlib.import_module(name), of.node.name).__mro__:
        if base.__module__.split(".")[0] not in ("builtins", *HOMES):
            (theirs,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(theirs, ast.ClassDef)
            found |= declared_fields(theirs) | assigned_fields(theirs, born=True)
    return found


def is_program(source: Source) -> bool:
    """Whether this is part of a measuring program, or of what they share with tests: each of
    them has names of its own."""
    return bool({"attacks", "fixtures", "gpu_check", "peers"} & {*source.path.parts}) or (
        ROOT / "bench" in source.path.parents and "__name__ ==" in source.text
    )


def test_no_attribute_is_born_outside_init() -> None:
    """An attribute of a base that is not ours is born in that base's `__init__`."""
    assert not Classes(FILES).late(), "an attribute is born in `__init__`"
    text = """
        class New:
            def __init__(self):
                self.early = 1

            def begin(self):
                self.early = self.late = 2
        """
    late = Classes(planted("core/new.py", text)).late()
    assert late == {"saccade/core/new.py: New": {"late"}}


def test_no_two_classes_have_one_name() -> None:
    assert not Classes(FILES).doubles()
    text = "class Same: pass\nclass _Own: pass"
    both = [*planted("core/a.py", text), *planted("edge/b.py", text)]
    assert Classes(both).doubles() == [["saccade/core/a.py: Same", "saccade/edge/b.py: Same"]]


def missing_files(text: str) -> list[str]:
    """The files and folders that a document names in code, and that are nowhere."""
    named = re.findall(r"`((?:[\w.*-]+/)+[\w.*-]*|[\w-]+\.py)`", text)
    homes = ROOT / "tests", ROOT / "docs", *HOMES.values()
    return [
        name
        for name in named
        if not (ROOT / name).exists()
        and not any(any(home.rglob(name.rstrip("/"))) for home in homes)
    ]


def test_every_file_that_the_plan_names_exists() -> None:
    assert not missing_files((ROOT / "ARCHITECTURE.md").read_text())
    text = "`core/plan.py`, `runtime/weights/` and `core/gone.py`, `attic/`, `gone.py`"
    assert missing_files(text) == ["core/gone.py", "attic/", "gone.py"]


LOOKING_UP = ("core.decoders", "proxy.send_once")
"""The second imports nothing of ours, and nothing else decodes its classes."""
LOOKS_UP = re.compile(
    r"msgspec\.(convert\(|(json|msgpack)\.(Decoder\(|decode\([^\n]*\btype=(?!dict\[)))"
)


def lapses(source: Source) -> Iterator[str]:
    """House rules of style."""
    if source.path.stem in {"utils", "common", "helpers", "manager", "base"}:
        yield "a name that says nothing"
    content = source.path.stem != "__init__" or source.tree.body
    if content and not ast.get_docstring(source.tree):
        yield "every file opens with what it owns"
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield "no global"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) > 2
        ):
            yield "no feature probes by getattr with a default"
    if source.module not in LOOKING_UP and LOOKS_UP.search(source.text):
        yield "msgspec looks fields up in core/decoders.py"


def test_house_rules_of_style() -> None:
    assert not offenders(lapses)
    text = "def f(x):\n    global y\n    return getattr(msgspec.convert(x, y), 'y', None)"
    assert offenders(lapses, planted("core/utils.py", text)) == [
        "saccade/core/utils.py: a name that says nothing",
        "saccade/core/utils.py: every file opens with what it owns",
        "saccade/core/utils.py: no global",
        "saccade/core/utils.py: no feature probes by getattr with a default",
        "saccade/core/utils.py: msgspec looks fields up in core/decoders.py",
    ]


UNREAD = "unread_fields.py"
"""The table of names that a dialect may not read."""
MOST_FILES = 5
"""Files of saccade/ that may name a field of every dialect, or an option of sampling."""
EVERYDAY = {"priority"}
"""Fields whose names are words for other things, too."""


def test_a_field_is_named_in_few_files() -> None:
    fields = {*msgspec.structs.asdict(Restraint())} - EVERYDAY
    fields |= {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != UNREAD]
    named = {
        field: sum(re.search(rf"\b{field}\b", text) is not None for text in texts)
        for field in fields
    }
    assert not {field: count for field, count in named.items() if not 0 < count <= MOST_FILES}


FRONT = (
    "core",
    "text",
    "front",
    "cache",
    "sched",
    "engine",
    "edge",
    "api",
    "route",
    "proxy",
    "media",
)
"""Rooms that import no torch; the last may parse bytes of images, as workers of it do."""
LOADING = """
import importlib, json, sys
hostile = {"saccade.media.formats.header", "PIL.PngImagePlugin", "PIL.AvifImagePlugin"}
found = set()
for room, modules in json.loads(sys.argv[1]):
    for module in modules:
        importlib.import_module(module)
        for bad in ({"torch", "transformers"} | (hostile if room != "media" else set())) - found:
            if bad in sys.modules:
                found.add(bad)
                print(f"{module} loads {bad}")
"""


def loaded(rooms: Sequence[tuple[str, Sequence[str]]], folder: Path = ROOT) -> list[str]:
    """Those of the modules of rooms that load torch, or what reads bytes of images."""
    command = [sys.executable, "-c", LOADING, json.dumps(rooms)]
    done = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def test_the_front_half_imports_without_torch() -> None:
    """And bytes of images are parsed by image workers only."""
    rooms = [
        (
            room,
            [
                f"saccade.{source.module}"
                for source in FILES
                if PACKAGE / room in source.path.parents
                and source.path.stem != "worker"
                and source.path != RAY
            ],
        )
        for room in FRONT
    ]
    rooms.insert(0, ("families", [family.spec.split(":")[0] for family in families()]))
    assert all(modules for _, modules in rooms)
    assert not loaded(rooms)


def test_a_module_that_loads_torch_or_parses_images_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "new.py").write_text("import torch")
    (tmp_path / "reader.py").write_text("import PIL.PngImagePlugin")
    assert loaded([("core", ["new", "reader"])], tmp_path) == [
        "new loads torch",
        "reader loads PIL.PngImagePlugin",
    ]
    assert not loaded([("media", ["reader"])], tmp_path)
