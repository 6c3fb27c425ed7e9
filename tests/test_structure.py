"""The house plan, enforced: who may import whom, and what imports without torch. Each rule lists
all offenders at once, and is shown one that was planted for it.
"""

from __future__ import annotations

import ast
import dataclasses
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

from saccade.core.types import SAMPLING_BOUNDS, SamplingParams
from saccade.families.registry import families
from saccade.plugins import plugins
from saccade.plugins.docs.openapi import descriptions

pytestmark = pytest.mark.slow  # in `make check`

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
NEIGHBOURS = {"saccade_bench": ROOT / "bench", "train": ROOT}
"""Packages next to the server's, and the folders that hold them."""
RAY = PACKAGE / "plugins" / "ray" / "serving.py"
"""Imports what only the extra `ray` brings."""
HOMES = {"saccade": ROOT, **NEIGHBOURS}
IN_A_CLONE = tuple(
    f"bench/saccade_bench/{name}.py" for name in ("generate", "transformers_any", "screens/shapes")
)
"""Programs that compare with transformers on checkpoints of `tests/fixtures/`."""


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
            if name.split(".")[0] in (*HOMES, "tests"):
                inner = "__init__" if name == "saccade" else name.removeprefix("saccade.")
                yield inner, id(node) in top


@cache
def is_module(package: str, name: str) -> bool:
    folder = HOMES[package.split(".")[0]].joinpath(*package.split("."))
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def fits(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def bound(pattern: str, module: str) -> str:
    """`~` is the part of the module's own name in that position."""
    own = [*module.split("."), "", ""]
    return ".".join(own[i] if part == "~" else part for i, part in enumerate(pattern.split(".")))


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
    may = [*may, *required(module)]
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


def required(module: str) -> list[str]:
    """The plugins that a plugin's record requires."""
    folder = ".".join(module.split(".")[:2])
    records = [each for each in plugins() if folder == f"plugins.{each.name}"]
    return [f"plugins.{name}" for each in records for name in each.requires]


def named_plugins(source: Source) -> Iterator[str]:
    """Plugins that a file outside their folder imports or writes as a dotted name.

    A plugin's file may be named after another that alone imports it: `gguf.py`.
    """
    own = ".".join(source.module.split(".")[:2])
    names = {name for name, _ in imports(source)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {name.removeprefix("saccade.") for name in re.findall(DOTTED, node.value)}
    for name in sorted(names):
        made_for = own.startswith("plugins.") and source.path.stem.startswith(
            name.removeprefix("plugins.").split(".")[0]
        )
        allowed = (own, *required(source.module))
        if name.startswith("plugins.") and not (
            made_for or any(fits(name, each) for each in allowed)
        ):
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
    named = "from saccade.plugins.gguf import fields"
    assert offenders(named_plugins, planted("families/qwen_vl/gguf.py", named))
    assert not offenders(named_plugins, planted("plugins/models/gemma3/gguf.py", named))


def loads_of_record(source: Source) -> Iterator[str]:
    """What a plugin's record imports besides its class and the standard library.

    Every process loads all records.
    """
    for node in source.tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name != "saccade.plugin" and _root(name) not in sys.stdlib_module_names:
                yield f"imports {name}"


def test_a_plugin_s_record_imports_nothing_else() -> None:
    records = [each for each in FILES if re.fullmatch(r"plugins\.\w+", each.module)]
    assert {f"plugins.{plugin.name}" for plugin in plugins()} <= {each.module for each in records}
    assert not offenders(loads_of_record, records)
    text = "from saccade.core.options import ServeOptions\nimport torch"
    assert offenders(loads_of_record, planted("plugins/new/__init__.py", text)) == [
        "saccade/plugins/new/__init__.py: imports saccade.core.options",
        "saccade/plugins/new/__init__.py: imports torch",
    ]


BACKENDS = {"x86", "triton", "flash", "fa3", "fa4", "flashinfer"}
"""Names of operations and of attention that two plugins bring."""


def named_backends(source: Source) -> Iterator[str]:
    """Such names, written as code outside the plugins: others ask for what a backend can do."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and node.value in BACKENDS:
            yield f"names {node.value}"


def test_shared_code_names_no_backend() -> None:
    server = [each for each in FILES if PACKAGE in each.path.parents]
    theirs = ("plugins.cpu", "plugins.gpu")
    own = [each for each in server if any(fits(each.module, room) for room in theirs)]
    assert not offenders(named_backends, [each for each in server if each not in own])
    assert {each.split()[-1] for each in offenders(named_backends, own)} == BACKENDS
    text = "def f(ops):\n    'By triton.'\n    return ops.name == 'x86'"
    assert offenders(named_backends, planted("nn/new.py", text)) == ["saccade/nn/new.py: names x86"]


def nested(paths: Iterable[Path]) -> list[str]:
    """Folders of model families within another's."""
    homes = PACKAGE / "families", PACKAGE / "plugins/models"
    folders = {
        path.relative_to(home).parent for path in paths for home in homes if home in path.parents
    }
    return sorted(str(folder) for folder in folders if len(folder.parts) > 1)


def test_no_family_imports_another() -> None:
    """What several share is in `families/kit/`."""
    text = "from saccade.families.qwen_vl import video\nfrom saccade.families.kit import grid_spec"
    for folder in ("plugins/models/gemma3", "families/kit"):
        assert offenders(foreign_imports, planted(f"{folder}/new.py", text)) == [
            f"saccade/{folder}/new.py: may not import families.qwen_vl.video"
        ]
    text = "from saccade.plugins.models.smolvlm import images"
    assert offenders(foreign_imports, planted("plugins/models/gemma3/new.py", text))
    assert not nested(source.path for source in FILES)
    assert nested([PACKAGE / "families/qwen_vl/dots_ocr/net.py"]) == ["qwen_vl/dots_ocr"]


def uses_of_ray(source: Source) -> Iterator[str]:
    if "plugins.ray.serving" in {name for name, _ in imports(source)}:
        yield "imports plugins.ray.serving"
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
    text = "def f():\n    import ray.serve\n    from saccade.plugins.ray import serving"
    assert offenders(uses_of_ray, planted("edge/new.py", text)) == [
        "saccade/edge/new.py: imports plugins.ray.serving",
        "saccade/edge/new.py: imports ray",
    ]


def uses_of_bench(source: Source) -> Iterator[str]:
    """Imports of the packages next to the server's by its own modules, and of tests by the bench:
    neither is installed with them.
    """
    names = (name for name, _ in imports(source))
    if PACKAGE in source.path.parents:
        yield from (f"imports {name}" for name in names if _root(name) in (*NEIGHBOURS, "tests"))
    elif source.name not in IN_A_CLONE and ROOT / "bench/saccade_bench" in source.path.parents:
        yield from (f"imports {name}" for name in names if _root(name) == "tests")


def _root(name: str) -> str:
    return name.split(".")[0]


def test_no_module_of_the_server_imports_the_bench_or_tests() -> None:
    """Nor does the bench import tests, but for programs that run in a clone."""
    assert not offenders(uses_of_bench)
    for name in ("saccade_bench.fixtures.pdf", "tests.fixtures.tiny"):
        text = f"def f():\n    import {name}"
        assert offenders(uses_of_bench, planted("commands.py", text)) == [
            f"saccade/commands.py: imports {name}"
        ]
    users = (source for source in FILES if source.name in IN_A_CLONE)
    assert all("from tests.fixtures" in source.text for source in users)


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


def missing_modules(sources: Sequence[Source]) -> list[str]:
    """Modules that docstrings and comments name by a path, and that do not exist."""
    there = {"/".join(source.path.parts[-count:]) for source in FILES for count in range(1, 7)}
    return [
        f"{source.name}: {name}"
        for source in sources
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", source.text)
        if name not in there and not (ROOT / name).exists() and not name.startswith("vllm/")
    ]


def test_every_module_that_a_docstring_names_exists() -> None:
    assert not missing_modules(FILES)
    text = '"""See `core/plan.py`, `core/gone.py` and `vllm/envs.py`."""'
    assert missing_modules(planted("core/a.py", text)) == ["saccade/core/a.py: core/gone.py"]


LOOKING_UP = ("core.decoders", "tools.send_once")
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
MAX_FILES = 5
"""Files of saccade/ that may name a field of several dialects, or an option of sampling."""
MAX_GROUPS = 3
"""Groups of a body's fields that may declare one name."""
OTHER_MEANINGS = {
    **dict.fromkeys(
        ("input", "messages", "metadata", "model", "priority", "reasoning", "saccade", "stream"),
        "an everyday word",
    ),
    **dict.fromkeys(("thinking", "tools"), "an everyday word"),
    "cache_control": "also a mark on a part, a message and a tool",
    "cache_salt": "also what the engine's requests have",
    "reasoning_effort": "also a variable of templates",
    "tool_choice": "also what a grammar is made of",
    "top_logprobs": "also what answers have",
}
"""Fields whose names stand for something else, too: only their declarations are counted."""


def groups() -> Iterator[tuple[int, type]]:
    """Each dialect, as a number, and each group of fields in its bodies."""
    for dialect, description in enumerate(descriptions(plugins())):
        for schemas in description.bodies.values():
            yield from ((dialect, group) for schema in schemas for group in schema.groups)


def declaring(group: type) -> Iterator[tuple[str, type]]:
    """Each field of a group, and the class in which it stands."""
    for kind in group.__mro__:
        if issubclass(kind, msgspec.Struct):
            yield from ((field, kind) for field in inspect.get_annotations(kind))


def count_files(fields: Iterable[str]) -> dict[str, int]:
    """Files of saccade/ with each name."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != UNREAD]
    return {
        field: sum(re.search(rf"\b{field}\b", text) is not None for text in texts)
        for field in fields
    }


def test_a_field_of_several_dialects_is_named_in_few_files() -> None:
    dialects: dict[str, set[int]] = {}
    for dialect, group in groups():
        for field, _ in declaring(group):
            dialects.setdefault(field, set()).add(dialect)
    shared = {field for field, named in dialects.items() if len(named) > 1}
    assert len(shared) > 40 and shared > OTHER_MEANINGS.keys()
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    counts = count_files(shared - sampling - OTHER_MEANINGS.keys())
    assert not {field: count for field, count in counts.items() if not 0 < count <= MAX_FILES}


def test_a_field_of_several_dialects_is_declared_few_times() -> None:
    declared: dict[str, set[type]] = {}
    for _, group in groups():
        for field, kind in declaring(group):
            declared.setdefault(field, set()).add(kind)
    assert not {field: kinds for field, kinds in declared.items() if len(kinds) > MAX_GROUPS}


SAMPLING_FILES = 4
"""Files of saccade/ that may name an option of sampling: its own, a dialect's, its words, one more.
"""
SENDERS = (
    "plugins.messages",
    "plugins.responses",
    "plugins.any_model",
    "plugins.ocr",
    "demo",
    "tools",
)
"""Dialects of other vendors, and what asks a server: they write the names that they send."""
EVERYDAY_SAMPLING = {"max_tokens", "seed", "logprobs"}


def files_that_name(option: str, sources: Sequence[Source]) -> list[str]:
    return [
        source.name
        for source in sources
        if not any(fits(source.module, sender) for sender in SENDERS)
        and source.path.name != UNREAD
        and re.search(rf"\b{option}\b", source.text)
    ]


def test_an_option_of_sampling_is_named_in_few_files() -> None:
    """Kernels take columns of numbers (`kernels/reference/sample.py`)."""
    options = {*SAMPLING_BOUNDS, "logit_bias"} - EVERYDAY_SAMPLING
    server = [each for each in FILES if PACKAGE in each.path.parents]
    named = {option: files_that_name(option, server) for option in options}
    few = {option: files for option, files in named.items() if 1 < len(files) <= SAMPLING_FILES}
    assert named == few
    more = planted("kernels/new.py", "def draw(logits, min_p):\n    return logits > min_p")
    assert len(files_that_name("min_p", [*server, *more])) == len(named["min_p"]) + 1


FRONT = (
    "core",
    "text",
    "front",
    "cache",
    "sched",
    "engine",
    "edge",
    "api",
    "plugins/route",
    "plugins/proxy",
    "media",
)
"""Rooms that import no torch; the last may parse bytes of images, as workers of it do."""
LOADING = """
import importlib, json, sys
hostile = {"saccade.media.formats.header", "PIL.Image", "PIL.PngImagePlugin", "PIL.AvifImagePlugin"}
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


def engine_modules() -> list[str]:
    """The modules that plugins offer to the engine."""
    parts = [
        offer.build
        for each in plugins()
        for offer in (
            each.scheduling.step_part,
            each.caches.page_loads,
            each.caches.page_tiers,
            each.caches.snapshots,
            each.scheduling.scheduler,
        )
        if offer
    ]
    parts += [part for each in plugins() if (part := each.scheduling.cache_part)]
    return [part.split(":")[0] for part in parts]


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
    served = [f"saccade.plugins.{plugin.name}." for plugin in plugins() if plugin.is_http]
    modules = [f"saccade.{each.module}" for each in FILES if each.path.stem != "worker"]
    rooms.insert(1, ("engine's parts", engine_modules()))
    rooms[1:1] = [(name, [each for each in modules if each.startswith(name)]) for name in served]
    assert all(modules for _, modules in rooms)
    assert not loaded(rooms)


def test_a_module_that_loads_torch_or_parses_images_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "new.py").write_text("import torch")
    (tmp_path / "reader.py").write_text("import PIL.Image")
    assert loaded([("core", ["new", "reader"])], tmp_path) == [
        "new loads torch",
        "reader loads PIL.Image",
    ]
    assert not loaded([("media", ["reader"])], tmp_path)
