"""What `saccade serve` says while it starts, and how Ctrl-C ends that: real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.core.arena import Arena
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.private_folder import cache_folder
from saccade.engine.link import EngineProcess
from saccade.ipc.child import Child
from saccade.ipc.messages import Loading
from saccade_bench.fixtures.server import serving
from tests.helpers.processor import HAS_BACKEND
from tests.terminal import CTRL_C, Terminal, gone

pytestmark = pytest.mark.more

DEMO = Path(__file__).parents[2] / "saccade" / "demo" / "model"
SERVE = (sys.executable, "-m", "saccade", "serve", "demo", "--port", "0", "--media-workers", "1")
IMPORT = "import time:"


def test_start_up_says_how_far_it_is_from_before_the_heavy_imports_to_the_pages_url() -> None:
    """In lines, where nobody watches. Python notes on stderr when each import has ended."""
    noted = [sys.executable, "-X", "importtime", *SERVE[1:]]
    server = subprocess.Popen(noted, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line.rstrip())
            if line.startswith("web UI"):
                break
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    first = lines.index("loading demo ... (Ctrl-C stops it)")
    after = {line.rpartition("|")[2].strip() for line in lines[first:] if IMPORT in line}
    assert {"saccade.api.serve", "tokenizers", "starlette.applications"} <= after
    said = [line for line in lines if IMPORT not in line]
    stages = dict.fromkeys(line.strip().partition(":")[0] for line in said)
    assert [*stages][1:4] == ["starting PyTorch", "weights", "caches and kernels"]
    serving, page = said[-2:]
    url = serving.removeprefix("serving at ").removesuffix("/v1")
    assert page == f"web UI: {url}/"


@pytest.mark.skipif(not HAS_BACKEND, reason="Numba's kernels are for x86-64")
@pytest.mark.timeout(400)
def test_the_second_start_compiles_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (known := cache_folder("code")).exists():  # or all kernels would be compiled here
        shutil.copytree(known, tmp_path / "saccade" / "code")
        (tmp_path / "saccade" / "code").chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def start() -> str:
        shapes = "--dtype", "bfloat16", "--context-length", "1234"  # nobody else's
        with serving("demo", tmp_path, *shapes) as server:
            (line,) = (each for each in server.log.read_text().splitlines() if "start-up" in each)
        return line.split("start-up")[1].strip()

    assert start().endswith(" compiled, exact rows measured")
    assert start().endswith(" kernels and exact rows kept from last start")


@pytest.mark.parametrize(
    "moment",
    [
        "loading demo",
        pytest.param("weights", marks=pytest.mark.more),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("starting PyTorch", "caches")),
    ],
)
def test_ctrl_c_ends_start_up_with_a_sentence_and_leaves_no_process(
    moment: str, tmp_path: Path
) -> None:
    """With nothing kept from an earlier start, which would be over too soon."""
    with Terminal(SERVE, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        terminal.until(moment)
        family = terminal.family()
        terminal.type(CTRL_C)
        status = terminal.ended()
        assert status == 130, terminal.shown
        assert "Traceback" not in terminal.shown
        assert "stopped before" in terminal.shown.splitlines()[-1]
        assert gone(family) == []


def test_ctrl_c_while_the_commands_are_being_loaded_is_a_sentence_too(tmp_path: Path) -> None:
    """A library of the command line takes its time here: it stands for a slow disk."""
    (tmp_path / "cyclopts.py").write_text("import time\nprint('importing')\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with Terminal(SERVE, {**os.environ, "PYTHONPATH": path}) as terminal:
        terminal.until("importing")
        terminal.type(CTRL_C)
        assert terminal.ended() == 130
        assert "Traceback" not in terminal.shown
        assert terminal.shown.splitlines()[-1] == "stopped before it had started"


def test_nobody_waits_for_an_engine_that_is_still_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears nothing while it loads: the seconds that it gets to end are for one that serves."""
    patience: list[float] = []
    end = Child.end

    async def noted(child: Child, seconds: float = 0.0) -> None:
        patience.append(seconds)
        await end(child, seconds)

    async def stop_at_once() -> None:
        engine = EngineProcess(DEMO, ModelOptions(), EngineOptions(), Arena.create(1 << 20))
        told = asyncio.Queue[Loading]()
        starting = asyncio.create_task(engine.start(told.put_nowait))
        assert (await told.get()).stage == "starting PyTorch"
        starting.cancel()
        await engine.stop(0.0)

    monkeypatch.setattr(Child, "end", noted)
    asyncio.run(stop_at_once())
    assert patience == [0.0]
