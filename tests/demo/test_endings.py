"""`saccade demo` and `make demo` end, whatever ends them: no process of theirs is left."""

from __future__ import annotations

import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from saccade.ipc.own_server import free_port
from tests.terminal import SECONDS, Terminal

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SACCADE = [sys.executable, "-m", "saccade"]
SERVES, LOADS = "until Ctrl-C", "saccade serve demo"
WORKER = "saccade.runtime.process"
PR_SET_CHILD_SUBREAPER = 36


class Family:
    """All that begins within a test. Orphans come to this process, so that none is overlooked."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._before = {*self._own.children(recursive=True)}

    def running(self) -> list[psutil.Process]:
        found = [*{*self._own.children(recursive=True)} - self._before]
        return [each for each in found if command_of(each)]

    def loads(self) -> None:
        """Return once a server has begun to load its model."""
        deadline = time.monotonic() + SECONDS
        while not any(WORKER in command_of(each) for each in self.running()):
            assert time.monotonic() < deadline, self.running()
            time.sleep(0.05)

    def ends(self) -> bool:
        """True if nothing of it is left, once it has had its time."""
        deadline = time.monotonic() + SECONDS
        while (left := self.running()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=1)
        return not left


def command_of(process: psutil.Process) -> list[str]:
    """Nothing for one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def family() -> Iterator[Family]:
    adopt = partial(ctypes.CDLL(None).prctl, PR_SET_CHILD_SUBREAPER)
    adopt(1)
    family = Family()
    yield family
    left = family.running()
    for each in left:
        each.kill()
    psutil.wait_procs(left)
    adopt(0)


@pytest.fixture
def make(tmp_path: Path) -> list[str]:
    """`make demo` with what is installed here."""
    program = tmp_path / "bin" / "saccade"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom saccade.__main__ import main\nmain()\n")
    program.chmod(0o755)
    command = ["make", "-C", str(ROOT), "-o", ".venv/.installed", f"BIN={program.parent}", "demo"]
    return [*command, f"ARGS=--port {free_port()}"]


Ending = Callable[[Terminal], None]
HANG_UP: Ending = Terminal.close
TERMINATE: Ending = lambda at: at.process.terminate()  # noqa: E731
KILL: Ending = lambda at: at.process.kill()  # noqa: E731


@pytest.mark.parametrize(
    ("words", "end"),
    [
        pytest.param(SERVES, HANG_UP, id="its terminal closes"),
        pytest.param(LOADS, HANG_UP, id="its terminal closes while it loads"),
        pytest.param(SERVES, TERMINATE, id="SIGTERM"),
        pytest.param(LOADS, KILL, id="SIGKILL"),
    ],
)
def test_nothing_of_a_demo_outlives_it(
    family: Family, words: str, end: Ending, tmp_path: Path
) -> None:
    port = str(free_port())
    with Terminal([*SACCADE, "demo", "--port", port], cwd=tmp_path) as demo:
        demo.until(words)
        family.loads()
        if words == SERVES:
            typed = shlex.split(demo.until("picture.'"))[-7:]
            assert typed[-6:-2] == ["chat", "--base-url", f"http://127.0.0.1:{port}/v1", "--image"]
            assert (tmp_path / typed[-2]).is_file()
        end(demo)
        assert family.ends()


@pytest.mark.parametrize("end", [KILL, TERMINATE, HANG_UP], ids=["SIGKILL", "SIGTERM", "SIGHUP"])
def test_nothing_of_make_demo_outlives_make(family: Family, make: list[str], end: Ending) -> None:
    with Terminal(make) as demo:
        family.loads()
        end(demo)
        assert family.ends()


def test_ctrl_c_is_no_error_of_make(family: Family, make: list[str]) -> None:
    """Whenever it is pressed: here, while the model is loaded."""
    with Terminal(make) as demo:
        family.loads()
        demo.type("\x03")
        demo.ended()
        assert "Error" not in demo.shown and "***" not in demo.shown
        assert family.ends()


def test_a_demo_ends_with_the_reader_of_its_output(family: Family, tmp_path: Path) -> None:
    command = [*SACCADE, "demo", "--port", str(free_port())]
    demo = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE)
    assert demo.stdout is not None
    with demo:
        try:
            while SERVES.encode() not in demo.stdout.readline():
                pass
            family.loads()
            demo.stdout.close()
            assert family.ends()
        finally:
            demo.kill()


def test_a_demo_that_ignores_hang_ups_goes_on(family: Family, tmp_path: Path) -> None:
    """As `nohup` has it."""
    command = ["nohup", *SACCADE, "demo", "--port", str(free_port())]
    with Terminal(command, cwd=tmp_path) as demo:
        family.loads()
        demo.process.send_signal(signal.SIGHUP)
        out = tmp_path / "nohup.out"
        deadline = time.monotonic() + SECONDS
        while SERVES not in out.read_text():
            assert time.monotonic() < deadline and demo.process.poll() is None
            time.sleep(0.1)
        demo.process.terminate()
        assert family.ends()
