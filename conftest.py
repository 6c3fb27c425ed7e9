"""Fixtures that several rooms' tests share: tiny checkpoints, made once per session, and
transformers on them.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.breadth import mark_the_rest, take_float32
from tests.helpers.cuda_errors import pytest_runtest_makereport as pytest_runtest_makereport

# A run has some fifty processes that import the same modules: these are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read when torch is first imported: threads that wait must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read when Triton is first imported, which any test may cause: without a GPU, kernels are
# interpreted.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONG = (
    *("real/test_smollm2.py", "families/test_contract.py"),
    *(
        "e2e/test_processes.py",
        "e2e/test_route.py",
        "e2e/test_serve.py",
        "parallel/test_workers.py",
    ),
    *("media/test_pool.py", "media/test_media.py", "engine/test_tiers.py", "engine/test_parity.py"),
    *("e2e", "parallel", "sched", "lab", "demo", "media", "load", "tools"),
)
"""Files and folders with the longest tests, which come first: files are given to whichever process
is free, and one that began with a long file at the end would end alone.
"""

TOGETHER = {
    "tiny": (
        *("changed", "decisions", "documents", "flush", "prewarm", "regions"),
        *("scores", "serve", "structured", "video"),
    ),
    "hurried": ("fuzz", "names"),
    "measured": ("loads", "walks"),
}
"""Servers of `tests/e2e/conftest.py`, and who asks them."""

pytest_plugins = ["pytester", "tests.helpers.leftovers"]

if TYPE_CHECKING:
    from tests.families.answers import Model
    from tests.fixtures.tiny import Reference


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and items stay to the end: a look for garbage among them finds none."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_unconfigure() -> None:
    # Libraries look for what they have leaked as the interpreter ends. Not now: pytest collects
    # five times after this.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; otherwise the order stays. A GPU has every case of its kernels in no time,
    but for those in float32, which compile slowly and which no server has there: SACCADE_HALVES=1
    leaves them out.
    """
    if os.environ.get("SACCADE_HALVES") == "1":
        config.hook.pytest_deselected(items=take_float32(items))
    if not HAS_GPU:
        mark_the_rest(items)
    roots = [Path(__file__).parent / each for each in ("tests", "bench/tests")]

    def rank(item: pytest.Item) -> int:
        root = next((each for each in roots if item.path.is_relative_to(each)), None)
        place = item.path.relative_to(root) if root else item.path
        names = (place.as_posix(), place.parts[0])
        return min((LONG.index(name) for name in names if name in LONG), default=len(LONG))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Any:
    """Files are given out whole, those that share a server to one process."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None
    scheduling: Any = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope

    def scope(nodeid: str) -> str:
        file: str = file_of(nodeid)
        stem = file.removeprefix("tests/e2e/test_").removesuffix(".py")
        return next((name for name, stems in TOGETHER.items() if stem in stems), file)

    scheduling._split_scope = scope
    return scheduling


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Say how many tests there are, which pytest-xdist keeps to itself where it is to be quiet."""
    if node.gateway.id == "gw0":  # all find the same
        reporter = node.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"{len(ids):,} tests")


EVERY = [
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    ),
]


@pytest.fixture(scope="session", params=EVERY)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **options of make_checkpoint)`: a folder, the same for the same
    arguments.
    """
    from tests.fixtures.tiny import make_checkpoint

    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        name = family + json.dumps(options, sort_keys=True)
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(family), family, **options)
        return made[name]

    return make


@pytest.fixture(scope="session")
def gguf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`gguf_checkpoint(family, tie=False)`: a folder of which GGUF files are made."""
    from tests.plugins.gguf.files import make_gguf_checkpoint

    @cache
    def make(family: str, tie: bool = False) -> Path:
        return make_gguf_checkpoint(tmp_path_factory.mktemp("gguf"), family, tie=tie)

    return make


@pytest.fixture(scope="session")
def answered(checkpoint: Callable[..., Path]) -> Callable[[str], Model]:
    """`answered(family)`: a checkpoint in both worlds, with the answers to
    `tests.families.answers.CASES`.
    """
    from tests.families.answers import load

    return cache(lambda family: load(checkpoint(family)))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., Path]) -> Callable[..., Reference]:
    """`reference(family, **options of make_checkpoint)`: transformers on that checkpoint, float32,
    one thread.
    """
    import torch

    from tests.fixtures.tiny import reference as load

    torch.set_num_threads(1)

    load_once = cache(load)
    return lambda family, **options: load_once(checkpoint(family, **options))
