"""A GPU machine that is available for minutes, has no network, and returns few files: the check
brings its dependencies, its commands end in time, and stopping a command loses no results.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from saccade.plugins.gpu.libraries.installed import FA3_PACKAGES
from saccade_bench.gpu_check import __main__ as program
from saccade_bench.gpu_check import archive, correctness, machine, plan, report
from saccade_bench.gpu_check import run as runs
from saccade_bench.gpu_check.figures import Figure, printed
from saccade_bench.gpu_check.machine import ROOT
from saccade_bench.gpu_check.pytest_results import read_results
from saccade_bench.gpu_check.run import StageRunner
from saccade_bench.gpu_check.stages import COMMANDS, STAGES, Stage, most_seconds
from tests.helpers.breadth import broad

# ---- files for the GPU machine


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> Iterator[str]:
    """Yield the packages that saccade imports and their dependencies, except those installed on the
    GPU machine.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"extra": "", "python_version": "3.12"}
    left, seen = list(map(Requirement, project["dependencies"])), set[str]()
    while left:
        name = canonical(left.pop().name)
        if name in seen or name in plan.THERE:
            continue
        seen.add(name)
        yield name
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate(there):
                left.append(each)


def test_the_list_of_wheels_is_what_such_a_machine_lacks() -> None:
    assert {*needed(), "transformers"} == {*plan.wheel_names()}, "it has transformers 5.17"


def test_every_module_that_a_stage_needs_is_there_or_carried() -> None:
    distributions = packages_distributions()
    modules = {*machine.COMMON, *machine.ENGINE, *machine.SERVER, *machine.TESTS}
    for module in modules:
        known = {canonical(name) for name in distributions.get(module, [module])}
        assert known & {*plan.wheel_names(), *plan.THERE}, module


def test_wheels_are_asked_for_under_every_tag_that_they_have() -> None:
    command = plan.download_command(Path("out"), "3.12")
    tags = [after for word, after in pairwise(command) if word == "--platform"]
    assert "manylinux_2_31_x86_64" in tags, "llguidance has no other"
    assert {"manylinux2014_x86_64", "any"} <= set(tags)


def test_wheels_are_unpacked_without_pip(tmp_path: Path) -> None:
    """A damaged wheel is named, and does not stop the others."""
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "a_spoilt-1-py3-none-any.whl").write_bytes(b"PK\x03\x04 and no more")
    with zipfile.ZipFile(tmp_path / ".whl" / "thing-2.5-py3-none-any.whl", "w") as file:
        file.writestr("thing/__init__.py", "found = True")
        file.writestr("thing-2.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\n")
    site = tmp_path / "site"
    assert plan.unpack(tmp_path / ".whl", site) == ["a_spoilt-1-py3-none-any.whl"]
    look = "import thing; from importlib.metadata import distribution; distribution('thing')"
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", look], env=environment, check=True)


@pytest.mark.parametrize("whole", [True, False])
def test_flash_attention_is_unpacked_as_a_package_that_is_found(
    tmp_path: Path, whole: bool
) -> None:
    carried, site = tmp_path / ".whl", tmp_path / "site"
    carried.mkdir(), site.mkdir()
    packed = lzma.compress(b"library" * 99)
    (carried / f"{plan.FA3}.xz").write_bytes(packed if whole else packed[:40])
    assert plan.unpack(carried, site) == ([] if whole else [f"{plan.FA3}.xz"])
    if whole:
        assert (site / plan.FA3).read_bytes() == b"library" * 99
        assert plan.FA3_MODULE.stem in FA3_PACKAGES and (site / plan.FA3_MODULE.name).is_file()


# ---- three commands


def test_each_command_ends_in_time_whatever_its_stages_do() -> None:
    """All commands fit into the machine's time, including two starts and transfers."""
    for command in COMMANDS.values():
        assert most_seconds(command.stages) <= command.budget < command.seconds
    assert sum(command.seconds for command in COMMANDS.values()) + 3 * 90 <= 1800
    assert all(command.seconds < 600 for command in COMMANDS.values())
    names = [stage.name for command in COMMANDS.values() for stage in command.stages]
    assert len(names) == len({*names}) and {*names} <= {stage.name for stage in STAGES}


def test_the_commands_are_short_and_stand_in_the_readme() -> None:
    readme = (ROOT / "bench/README.md").read_text()
    for command in COMMANDS.values():
        line = plan.line_of(command)
        assert len(line) <= plan.MAX_CHARACTERS
        assert line in readme and f"at most {command.seconds:.0f} s" in readme
    look = ["git", "check-ignore", "-q", f"{plan.CARRIED}/thing.whl"]
    ignored = subprocess.run(look, cwd=ROOT, capture_output=True)
    assert ignored.returncode in (0, 128), "wheels are committed by nobody (128: no checkout)"


def test_the_plan_says_what_lacks_and_what_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([]) == 0
    said = capsys.readouterr().out
    assert all(plan.line_of(command) in said for command in COMMANDS.values())
    assert f"Carry {plan.CARRIED}" in said and "NOT READY: that" not in said
    assert 15 << 20 < plan.tracked_bytes() < 24 << 20 and "what failed is run again, first" in said


def test_the_check_itself_needs_no_package() -> None:
    """It does not even need Saccade's: if a package is missing, only the stages that need it
    fail.
    """
    look = (
        "import sys; before = {*sys.modules}; import saccade_bench.gpu_check.__main__; "
        "import saccade_bench.gpu_check.plan; "
        "names = {name.split('.')[0] for name in {*sys.modules} - before}; "
        "print(*sorted(names - {*sys.stdlib_module_names} - {'saccade_bench'}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bench")}
    command = [sys.executable, "-S", "-c", look]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


NEWER = ("minicpm_ocr", "minicpmv4_7")
"""Models of `tinies()` that transformers 5.17, the version on the GPU machine, lacks."""


def transformers_without(folder: Path, models: set[str]) -> None:
    """Create a package `transformers` in `folder` that lacks some models."""
    (source,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr, misc]
    for at, absent in (("", {"models", "__pycache__"}), ("models", models | {"__pycache__"})):
        (folder / "transformers" / at).mkdir(parents=True)
        for path in (Path(source) / at).iterdir():
            if path.name not in absent:
                (folder / "transformers" / at / path.name).symlink_to(path)


FAMILIES = ROOT / "tests/fixtures/families"


def imported_models() -> set[str]:
    """Return the models of transformers that the functions for tiny checkpoints import. Qwen3.5 is
    left out, because a kernel is compared with its functions.
    """
    makers = (path.read_text() for path in FAMILIES.glob("*.py"))
    found = {name for text in makers for name in re.findall(r"transformers\.models\.(\w+)", text)}
    assert {*NEWER[:1], "qwen2_vl", "gemma4"} <= found
    return found - {"qwen3_5"}


def run_without(folder: Path, models: set[str], *words: str) -> str:
    """Return the output of pytest when transformers lacks these models."""
    transformers_without(folder, models)
    environment = correctness.environment(folder / "results") | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.more
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lacking", ["newer", "all"])
def test_all_tests_are_collected_whatever_models_transformers_lacks(
    tmp_path: Path, lacking: str
) -> None:
    models = {*NEWER} if lacking == "newer" else imported_models()
    said = run_without(tmp_path, models, "--collect-only", "-qq", *correctness.PATHS)
    assert {*correctness.PATHS} <= {*re.findall(r"^(\S+): \d+$", said, re.MULTILINE)}


@pytest.mark.more
@pytest.mark.timeout(180)
def test_a_family_whose_class_transformers_lacks_is_skipped_with_a_reason(tmp_path: Path) -> None:
    test = "tests/kernels/test_engine_parity.py::test_a_tower_in_its_graphs_answers_as_pytorch_does"
    cases = [f"{test}[{family}]" for family in (*NEWER, "gemma3")]
    said = run_without(tmp_path, {*NEWER, "gemma3"}, "-rs", *cases)
    assert "3 skipped" in said
    for reason in ("has no MiniCPMOcrFor", "has no MiniCPMV4_7For", "transformers.models.gemma3"):
        assert reason in said


@pytest.mark.more
def test_only_the_requested_family_is_imported() -> None:
    look = (
        "import sys; from tests.fixtures.tiny import tinies; tinies()['gemma3'].require(); "
        "print(*(name for name in sys.modules if 'fixtures.families.' in name))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tests.fixtures.families.gemma3"]


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
    program.Archive = lambda *words: archive.Archive(*words, every=0.02)
    light = {"module": "work", "needs": (), "least": 0.0, "limit": 60.0, "options": ()}
    program.COMMANDS = {
        name: replace(command, stages=tuple(replace(stage, **light) for stage in command.stages))
        for name, command in program.COMMANDS.items()
    }
    sys.exit(program.main(sys.argv[1:]))
    """
"""The two commands with their own stages, each of which takes a quarter of a second."""
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


SEVERAL = [name for name, command in COMMANDS.items() if len(command.stages) > 1]
"""Commands with a process that keeps running after its stage has ended."""


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
    """Return a folder for modules of stages."""
    folder = tmp_path / "staged"
    folder.mkdir()
    (folder / "work.py").write_text(textwrap.dedent(WORK))
    (folder / "sleep.py").write_text("import time\ntime.sleep(120)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{':'.join(['', *sys.path])}")
    return folder


def kill_between(
    command: list[str], out: Path, after: int, wait: float
) -> tuple[set[str], dict[str, dict[str, Any]]]:
    """Start a check, wait until this many stages have ended and for this many more seconds, and
    kill it with -9. Returns (stages that it reported as done, stages in the archive).
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
    said += check.communicate()[0]  # until the pipe is closed: no other process has it open
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
@pytest.mark.parametrize("name", broad(SEVERAL, keep=["a"]))
def test_killed_at_any_moment_the_archive_holds_all_finished_stages(
    tmp_path: Path, staged: Path, name: str
) -> None:
    """Each command is killed while one of its stages runs."""
    rng = random.Random(name)
    last = len(COMMANDS[name].stages) - 1
    after = rng.sample(range(1, last + 1), min(2, last))
    for done in after:
        out = tmp_path / f"out{done}"
        words = ("--command", name, "--out", str(out), "--device", "cpu", "--quick")
        driver = [sys.executable, "-c", textwrap.dedent(DRIVER), *words]
        finished, stages = kill_between(driver, out, done, rng.uniform(0.0, 0.8))
        assert all(stages[each]["figures"][0]["value"] == 2.0 for each in finished)
    for pid in map(int, (staged / "pids").read_text().split()):
        await_end(pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_real_command_killed_at_any_second_leaves_its_figures_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # to find its processes by their arguments
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    out, stages = tmp_path / "out", len(COMMANDS[name].stages)
    words = ("--command", name, "--out", str(out), "--device", "cpu", "--quick")
    command = [sys.executable, "-m", "saccade_bench.gpu_check", *words]
    done = rng.randrange(1, stages)
    finished, found = kill_between(command, out, done, rng.uniform(0.0, 15.0))
    for done_stage in finished:
        assert all(each["error"] == "" for each in found[done_stage]["figures"]), done_stage
    until = time.monotonic() + 20.0
    while left := processes_of(str(tmp_path)):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def processes_of(word: str) -> list[int]:
    """Return the processes, except this one, whose command line contains `word`."""
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
    with archive.Archive(folder, out, lambda _: None, every=0.001) as kept:
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


CARD = "NVIDIA H100 80GB HBM3"


def left(folder: Path) -> None:
    """Write the files of a check that was stopped during its third stage."""
    folder.mkdir()
    facts = {"command": "x", "when": "2026-11-27 10:00 UTC", "hardware": {"gpu": CARD}}
    (folder / "command.json").write_text(json.dumps(facts | {"versions": {"saccade": "a" * 40}}))
    for name, status in (("correctness", "failed"), ("speeds", "ok")):
        with (folder / runs.OUTCOMES).open("a") as file:
            file.write(f'{{"name": "{name}", "command": "x", "status": "{status}"}}\n')
    (folder / "correctness.log").write_text("the last words of pytest\n" * 3)
    lines = ("a", "started"), ("a", "failed"), ("b", "started")
    (folder / correctness.RESULTS).write_text(
        "".join(f'{{"test": "tests/x.py::{test}", "outcome": "{each}"}}\n' for test, each in lines)
    )
    copy = Figure("copy", 2900.0, "GB/s", more=True)
    decode = Figure("decode, qwen3-vl-8b, batch 1", 141.5, "tok/s", more=True)
    for stage, figure in (("speeds", copy), ("speed", decode)):
        (folder / f"{stage}.figures.jsonl").write_text(f"{json.dumps(asdict(figure))}\n{{cut o")
    (folder / "speed.log").write_text("".join(f"{n} {n * n}\n" for n in range(20_000)))


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_report_is_made_of_a_cut_archive(tmp_path: Path, share: float) -> None:
    """The archive ends within the long log, which follows the figures."""
    left(tmp_path / "left")
    packed = archive.pack(tmp_path / "left")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / archive.NAME).write_bytes(packed[: int(share * len(packed))])
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "back"), "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    stages = {each["name"]: each for each in summary["stages"]}
    assert {name: each["status"] for name, each in stages.items()} == {
        "correctness": "failed",
        "speeds": "ok",
        "speed": "cut off",
    }
    assert stages["speed"]["figures"][0]["value"] == 141.5
    assert [*summary["tests"]["bad"]] == ["tests/x.py::a"]
    assert summary["tests"]["unfinished"] == ["tests/x.py::b"]
    text = (out / "report.md").read_text()
    assert f"gpu-check on {CARD}" in text and "the last words of pytest" in text
    assert "141 tok/s" in text or "142 tok/s" in text


def test_all_that_came_back_is_laid_out_to_be_committed(tmp_path: Path) -> None:
    """The command is the one that the check prints at its end, and that the report shows."""
    left(tmp_path / "left")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / archive.NAME).write_bytes(archive.pack(tmp_path / "left"))
    (tmp_path / "back" / "command.txt").write_text("printed")
    line = machine.keep_line(str(tmp_path / "back"), CARD)
    assert line.endswith("--out bench/results/h100")
    assert line in machine.keep_line(str(tmp_path / "back"), "NVIDIA H100 PCIe")
    out = tmp_path / "results" / "h100"
    assert report.main([str(tmp_path / "back"), "--out", str(out)]) == 0
    names = {path.name for path in (tmp_path / "left").iterdir()}
    assert {path.name for path in out.iterdir()} == {
        *names,
        "command.txt",
        "report.md",
        "summary.json",
    }
    assert "--out bench/results/h100" in (out / "report.md").read_text()


def test_a_report_is_made_of_what_a_command_printed(tmp_path: Path) -> None:
    """Only the end of the output is available: its beginning and all files are lost."""
    figure = Figure("decode, qwen3-vl-8b, batch 1", 141.5, "tok/s", more=True)
    said = f"off line | x | y\n{printed('speed', figure)}\n   speed: ok after 80 s\n"
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "command.txt").write_text(said)
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "back"), "--out", str(out), "--card", CARD]) == 0
    (stage,) = json.loads((out / "summary.json").read_text())["stages"]
    assert stage["name"] == "speed" and stage["figures"][0]["value"] == 141.5
    assert stage["figures"][0]["of_target"] == pytest.approx(141.5 / (253 * 3.0 / 4.3))


def test_a_table_is_filled_with_the_cards_name_in_every_row(tmp_path: Path) -> None:
    """Rows of other cards stay, and rows of the same card are replaced."""
    left(tmp_path / "left")
    text = tmp_path / "speed.md"
    old = f"| {CARD} | copy | 1 GB/s |  |  | then |"
    other = "| NVIDIA H200 | copy | 4,300 GB/s |  |  | then |"
    text.write_text(f"before\n{report.BEGIN}\n{old}\n{other}\n{report.END}\nafter\n")
    for _ in range(2):
        assert report.main([str(tmp_path / "left"), "--fill", str(text)]) == 0
    whole = text.read_text()
    assert whole.startswith("before\n") and whole.endswith("\nafter\n")
    rows = [line for line in whole.splitlines() if line.startswith("| ") and line != report.HEAD]
    assert len(rows) == 3 and other in rows and old not in rows
    assert f"| {CARD} | copy | 2,900 GB/s |  |  | 2026-11-27 aaaaaaaa |" in rows
    assert all("NVIDIA" in row for row in rows)
    with pytest.raises(ValueError, match="has no table"):
        report.fill_table(tmp_path / "left" / "correctness.log", [])


@pytest.mark.parametrize("name", ["docs/speed.md"])
def test_the_documentation_has_a_table_to_fill(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "text.md"
    copy.write_text((ROOT / name).read_text())
    report.fill_table(copy, [report.TableRow(CARD, "copy", "1 GB/s", "", "", "now")])
    assert f"| {CARD} | copy | 1 GB/s |" in copy.read_text()


def test_what_is_wrong_with_a_report_stops_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Path) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(program, "write_report", fail)
    words = ("--device", "cpu", "--quick", "--budget", "1", "--only", "speeds", "tower")
    assert program.main(["--out", str(tmp_path), *words]) == 0
    assert capsys.readouterr().out.count("KeyError: 'a fault of ours'") == 1
    with tarfile.open(tmp_path / archive.NAME) as packed:
        assert "command.json" in packed.getnames()


# ---- processes started by a stage


def test_pytest_of_the_correctness_stage_ends_with_it(
    tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a test that ignores signals, which is reported as unfinished."""
    monkeypatch.setattr(runs, "PACKAGE", "staged")
    test, pid = tmp_path / "test_deaf.py", tmp_path / "pid"
    test.write_text(
        "import os, signal, time\n"
        "def test_it():\n"
        "    for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)\n"
        f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(120)\n"
    )
    results = tmp_path / correctness.RESULTS
    (staged / "work.py").write_text(
        "import os, threading, time\nfrom pathlib import Path\n"
        "from saccade_bench.gpu_check.correctness import run\n"
        f"words = [{str(test)!r}], Path({str(results)!r}), time.monotonic() + 120, 0\n"
        "threading.Thread(target=run, args=words, daemon=True).start()\n"
        f"while not (Path({str(pid)!r}).exists() and Path({str(pid)!r}).read_text()):\n"
        "    time.sleep(0.05)\n"
        "os._exit(3)\n"
    )
    runner = StageRunner(tmp_path, device="cpu", quick=True, budget=130.0)
    outcome = runner.run(Stage("work", "work", "tests", (), 0.0, 110.0))
    assert (outcome.status, outcome.why) == ("failed", "exit status 3")
    await_end(int(pid.read_text()))
    (under_way,) = read_results(results).unfinished
    assert under_way.endswith("test_deaf.py::test_it")
