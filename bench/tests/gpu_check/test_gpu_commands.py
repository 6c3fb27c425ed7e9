"""A GPU machine that is lent for minutes, has no network, and hands back few files: what the check
needs is carried there, its commands end in time, and what ends them takes nothing back.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions, requires
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from saccade_bench.gpu_check import archive, correctness, machine, wheels
from saccade_bench.gpu_check import run as runs
from saccade_bench.gpu_check.machine import ROOT
from saccade_bench.gpu_check.run import StageRunner
from saccade_bench.gpu_check.stages import COMMAND_SECONDS, COMMANDS, STAGES, Stage, most_seconds
from tests.helpers.breadth import broad

# ---- what is carried there


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> Iterator[str]:
    """Packages that saccade imports, and what these need, but not what is there anyway."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"extra": "", "python_version": "3.12"}
    left, seen = list(map(Requirement, project["dependencies"])), set[str]()
    while left:
        name = canonical(left.pop().name)
        if name in seen or name in wheels.THERE:
            continue
        seen.add(name)
        yield name
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate(there):
                left.append(each)


def test_the_list_of_wheels_is_what_such_a_machine_lacks() -> None:
    assert set(needed()) == set(wheels.names())


def test_every_module_that_a_stage_needs_is_there_or_carried() -> None:
    distributions = packages_distributions()
    modules = {*machine.COMMON, *machine.ENGINE, *machine.SERVER, *machine.TESTS}
    for module in modules:
        known = {canonical(name) for name in distributions.get(module, [module])}
        assert known & {*wheels.names(), *wheels.THERE}, module


def test_wheels_are_asked_for_under_every_tag_that_they_have() -> None:
    command = wheels.command(Path("out"), "3.12")
    tags = [after for word, after in pairwise(command) if word == "--platform"]
    assert "manylinux_2_31_x86_64" in tags, "llguidance has no other"
    assert {"manylinux2014_x86_64", "any"} <= set(tags)


# ---- three commands


def test_each_command_ends_within_ten_minutes_whatever_its_stages_do() -> None:
    for command in COMMANDS:
        assert most_seconds(command) <= COMMAND_SECONDS <= 590
        assert command[0].name == "speeds", "floors follow from it"
    assert {stage.name for command in COMMANDS for stage in command} == {s.name for s in STAGES}


def test_every_kernels_tests_that_take_a_device_are_run_on_it() -> None:
    found = {
        path.stem.removeprefix("test_")
        for path in (ROOT / "tests/kernels").glob("test_*.py")
        if re.search(r"^    device: str,|\(device: str", path.read_text(), re.MULTILINE)
    }
    assert found <= set(correctness.KERNELS)
    assert all((ROOT / f"tests/kernels/test_{name}.py").is_file() for name in correctness.KERNELS)


# ---- results


DRIVER = """
    import sys
    from dataclasses import replace
    from saccade_bench.gpu_check import __main__ as program, archive, run
    run.PACKAGE = "staged"
    program.Archive = lambda folder, out: archive.Archive(folder, out, every=0.02)
    light = {"module": "work", "needs": (), "least": 0.0, "limit": 60.0, "options": ()}
    program.COMMANDS = tuple(
        tuple(replace(stage, **light) for stage in command) for command in program.COMMANDS
    )
    sys.exit(program.main(sys.argv[1:]))
    """
"""The three commands with their own stages, each of which does a quarter of a second's work."""
WORK = """
    import subprocess, sys, time
    from pathlib import Path
    from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
    from saccade_bench.gpu_check.tied import tied
    args = stage_arguments("")
    shard = subprocess.Popen(tied("staged.sleep"))
    with (Path(__file__).parent / "pids").open("a") as pids:
        pids.write(f"{shard.pid}\\n")
    FigureFile(args.figures).add(Figure("speed", 2.0, "tok/s"))
    time.sleep(0.2)
    shard.kill()
    """


def alive(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def await_end(pid: int) -> None:
    until = time.monotonic() + 20.0
    while alive(pid):
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.05)


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for modules of stages."""
    folder = tmp_path / "staged"
    folder.mkdir()
    (folder / "work.py").write_text(textwrap.dedent(WORK))
    (folder / "sleep.py").write_text("import time\ntime.sleep(120)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{':'.join(['', *sys.path])}")
    return folder


def kill_between(
    command: list[str], out: Path, after: int, wait: float
) -> tuple[set[str], dict[str, dict[str, Any]]]:
    """Begin a check, wait until so many stages have ended and so many seconds more, and kill -9:
    (stages that it had said to be done, those that the archive has).
    """
    check = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert check.stdout is not None
    said = ""
    while said.count(": ok after") < after:
        line = check.stdout.readline()
        assert line, said
        said += line
    time.sleep(wait)
    check.kill()
    said += check.communicate()[0]  # to its end: nobody else holds the pipe
    finished = set(re.findall(r"^   ([\w-]+): ok after", said, re.MULTILINE))
    with tarfile.open(out / archive.NAME) as packed:
        names = set(packed.getnames())
        summary = packed.extractfile("summary.json")
        assert summary is not None
        stages = {each["name"]: each for each in json.load(summary)["stages"]}
    assert len(finished) >= after
    assert finished <= {name for name, each in stages.items() if each["status"] == "ok"}
    assert {f"{name}.{kind}" for name in finished for kind in ("figures.jsonl", "log")} <= names
    assert json.loads((out / "summary.json").read_text())
    assert all(f"| {name} | ok |" in (out / "report.md").read_text() for name in finished)
    assert len(list(out.iterdir())) <= 8
    return finished, stages


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", broad(range(1, len(COMMANDS) + 1), keep=[1]))
def test_killed_at_any_moment_the_archive_holds_all_finished_stages(
    tmp_path: Path, staged: Path, number: int
) -> None:
    """Of each command, killed while any of its stages runs."""
    rng = random.Random(number)
    after = rng.sample(range(1, len(COMMANDS[number - 1])), 2)
    for done in after:
        out = tmp_path / f"out{done}"
        words = ("--command", str(number), "--out", str(out), "--device", "cpu", "--quick")
        driver = [sys.executable, "-c", textwrap.dedent(DRIVER), *words]
        finished, stages = kill_between(driver, out, done, rng.uniform(0.0, 0.8))
        assert all(stages[name]["figures"][0]["value"] == 2.0 for name in finished)
    for pid in map(int, (staged / "pids").read_text().split()):
        await_end(pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(1, len(COMMANDS) + 1))
def test_a_real_command_killed_at_any_second_leaves_its_figures_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # so that its processes are known by their words
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    out, stages = tmp_path / "out", len(COMMANDS[number - 1])
    words = ("--command", str(number), "--out", str(out), "--device", "cpu", "--quick")
    command = [sys.executable, "-m", "saccade_bench.gpu_check", *words]
    done = rng.randrange(1, stages)
    finished, found = kill_between(command, out, done, rng.uniform(0.0, 15.0))
    for name in finished:
        figures = found[name]["figures"]
        assert figures and all(each["error"] == "" for each in figures), name
    until = time.monotonic() + 20.0
    while left := processes_of(str(tmp_path)):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def processes_of(word: str) -> list[int]:
    """That have it in their command, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_text(errors="replace") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def test_files_that_grow_and_go_while_they_are_packed_spoil_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    grown = folder / "grown.log"
    with archive.Archive(folder, out, every=0.001) as kept:
        for number in range(300):
            with grown.open("a") as file:
                file.write("line\n" * 50)
            (folder / f"{number % 7}").write_text("x" * number)
            (folder / f"{(number + 3) % 7}").unlink(missing_ok=True)
            if number % 20 == 0:
                kept.write()
                with tarfile.open(out / archive.NAME) as packed:
                    assert "grown.log" in packed.getnames()
    with tarfile.open(out / archive.NAME) as packed:
        assert packed.getmember("grown.log").size == grown.stat().st_size


# ---- what a stage started


def test_shards_of_the_correctness_stage_end_with_it(
    tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PACKAGE", "staged")
    monkeypatch.setattr(runs, "END_SECONDS", 0.3)
    test = tmp_path / "test_deaf.py"
    test.write_text(
        "import os, signal, time\n"
        "def test_it():\n"
        "    for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(120)\n"
    )
    path = os.path.relpath(test, ROOT / "tests")
    (staged / "work.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from saccade_bench.gpu_check.correctness import begin\n"
        f"begin({path!r}, Path({str(tmp_path)!r}), 1)\n"
        f"while not Path({str(tmp_path / 'pid')!r}).exists(): time.sleep(0.05)\n"
        "time.sleep(120)\n"
    )
    runner = StageRunner(tmp_path, device="cpu", quick=True, budget=100.0)
    outcome = runner.run(Stage("work", "work", "tests", (), 0.0, 15.0))
    assert outcome.status == "timed out"
    await_end(int((tmp_path / "pid").read_text()))
