"""Everything that needs a GPU, in one command, on a CUDA machine without network and without an
installation:

    make gpu-check PYTHON=python3 ARGS="--out results"          (or: PYTHONPATH=. python3
    benchmarks/gpu_check.py --out results)

Checks what can be imported; runs the GPU tests, the benchmarks of kernels and of the vision tower,
and chats of eight rounds at three picture sizes on Qwen3-VL-8B with random weights through the real
server. Each stage is a process with a time limit; all together end within --budget seconds, and
what found no time is reported as skipped. Writes DIR/summary.json (hardware, versions, commands,
outcome and figures of every stage) beside the stages' own files. Status: 0 all went well, 1 a stage
failed, 2 it cannot run here.

`--device cpu --quick` exercises the whole of this script on tiny models; the figures mean nothing
then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESOLUTIONS = {"720p": "1280x720", "1080p": "1920x1080", "1440p": "2560x1440"}
TARGET_MS = {"1280x720": 17.0, "1920x1080": 39.0, "2560x1440": 88.0}
"""Encoding one picture with Qwen3-VL-8B's tower on an H200: published figures of others."""
TARGET_COPY = 0.7
TARGET_TTFT_MS = 400.0
LONGEST_TAIL = 2000

COMMON = (
    *("torch", "numpy", "safetensors", "tokenizers", "blake3", "tqdm", "rich"),
    *("cyclopts", "attrs", "docstring_parser", "rich_rst"),
)
ENGINE = ("msgspec", "psutil")
SERVER = (
    *(
        "uvicorn",
        "click",
        "h11",
        "starlette",
        "anyio",
        "uvloop",
        "httptools",
        "httpx",
        "httpcore",
        "hishel",
        "msgpack",
        "jinja2",
    ),
    *("prometheus_client", "python_multipart", "pybase64", "PIL", "simplejpeg", "pyspng"),
)
NEEDS = {
    "tests": (*COMMON, *ENGINE, "pytest"),
    "kernels": COMMON,
    "encoder": COMMON,
    "chat": (*COMMON, *ENGINE, *SERVER, "aiohttp"),
}
PACKAGES = {"PIL": "pillow"}
"""What an import is called as a package, where that differs."""


@dataclass
class Stage:
    """One process, or several that follow each other. `status`: ok, failed, timed out, skipped."""

    name: str
    command: str = ""
    status: str = "skipped"
    seconds: float = 0.0
    why: str = ""
    tail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Check:
    """One run: its options, the time it has left, what it has found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out.resolve()
        self.cuda: bool = args.device != "cpu"
        self.stages: list[Stage] = []
        self._deadline = time.monotonic() + args.budget
        path = os.environ.get("PYTHONPATH")
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
            "COLUMNS": "160",
        }

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def run(
        self, name: str, least: float, command: Sequence[str], limit: float | None = None
    ) -> Stage:
        """Run a stage that needs at least `least` seconds to say anything, and may take `limit`."""
        stage = self.begin(name, least, command)
        if stage.why:
            return stage
        began = time.monotonic()
        seconds = max(1.0, min(self.left, limit or self.left))
        with (self.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
                stage.status = "ok" if code == 0 else "failed"
                stage.why = "" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                end(process)
                stage.status, stage.why = "timed out", f"after {seconds:.0f} s"
        stage.seconds = round(time.monotonic() - began, 1)
        stage.tail = (self.out / f"{name}.log").read_text(errors="replace")[-LONGEST_TAIL:]
        return stage

    def begin(self, name: str, least: float, command: Sequence[str]) -> Stage:
        """A stage, with `why` if it cannot run."""
        stage = Stage(name, shlex.join(command))
        self.stages.append(stage)
        if absent := lacking(name.split("-")[0], self.cuda):
            stage.why = f"not installed: {', '.join(absent)}"
        elif self.left < least:
            stage.why = f"{self.left:.0f} s of the budget are left, and it needs {least:.0f}"
        print(f"== {name}: {'skipped, ' + stage.why if stage.why else stage.command}", flush=True)
        return stage


def missing(modules: Sequence[str]) -> list[str]:
    """Packages without which these cannot be imported."""
    return [
        PACKAGES.get(module, module).replace("_", "-")
        for module in modules
        if importlib.util.find_spec(module) is None
    ]


def lacking(stage: str, cuda: bool) -> list[str]:
    """Packages that a stage lacks."""
    return missing((*NEEDS[stage], *(("triton",) if cuda else ())))


def end(process: subprocess.Popen[Any], wait: float = 15.0) -> None:
    """Stop a process in order, then all of its session."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- the stages


def run_tests(check: Check) -> None:
    """Tests that are marked gpu."""
    results = check.out / "tests.xml"
    options = (
        "-m",
        "gpu",
        "-q",
        "-o",
        "filterwarnings=",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
    )
    stage = check.run(
        "tests",
        20,
        [sys.executable, "-m", "pytest", *options, "tests/gpu", "tests/kernels/test_rotary.py"],
        260,
    )
    if results.is_file():
        suite = next(ET.parse(results).getroot().iter("testsuite"))
        stage.figures = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        reasons = {skip.get("message", "") for skip in suite.iter("skipped")}
        stage.figures["skipped because"] = sorted(reasons)


def run_kernels(check: Check) -> None:
    """Rotary kernel by memory speed, positions."""
    output = check.out / "kernels.json"
    small = (
        "--models",
        "tiny-qwen3-vl",
        "--tokens",
        "256",
        "--resolutions",
        "160x96",
        "--repeats",
        "2",
        "--threads",
        "1",
    )
    sizes: tuple[str, ...] = (
        small
        if check.args.quick
        else ("--models", "qwen2.5-vl-7b", "qwen3-vl-8b", "--repeats", "20")
    )
    stage = check.run(
        "kernels",
        20,
        saccade(
            "bench", "kernels", "--device", device(check), *sizes, "--output-file", str(output)
        ),
        120,
    )
    if output.is_file():
        found = json.loads(output.read_text())
        speed = {
            (each["model"], each["tower"], each["dtype"], each["how"]): each["gb_per_s"]
            for each in found["rotary"]
        }
        shares = {
            " ".join(key[:3]): round(value / speed[(*key[:3], "copy")], 3)
            for key, value in speed.items()
            if key[3] == "saccade"
        }
        less = [
            each["times_less"]
            for each in found["positions"]
            if each["how"] == "seen grid" and each["times_less"]
        ]
        stage.figures = {"rotary, share of copy bandwidth": shares, "notes": found["notes"]}
        stage.figures["positions of a seen grid, times less than transformers"] = (
            round(min(less), 1) if less else None
        )
        stage.figures["target met"] = min(shares.values()) >= TARGET_COPY


def run_encoder(check: Check) -> None:
    """The vision tower, eager and with graphs, beside transformers' where that is installed."""
    output = check.out / "encoder.json"
    small = (
        "--models",
        "tiny-qwen3-vl",
        "--dtypes",
        "float32",
        "--resolutions",
        "160x96",
        "--repeats",
        "2",
        "--threads",
        "1",
    )
    sizes: tuple[str, ...] = (
        small
        if check.args.quick
        else ("--models", "qwen3-vl-8b", "--dtypes", "bfloat16", "--repeats", "10")
    )
    if not check.args.quick:
        sizes += ("--resolutions", *RESOLUTIONS.values())
    stage = check.run(
        "encoder",
        30,
        saccade(
            "bench", "encoder", "--device", device(check), *sizes, "--output-file", str(output)
        ),
        150,
    )
    if output.is_file():
        figures = json.loads(output.read_text())["figures"]
        stage.figures["ms per picture"] = {
            f"{each['pictures']}, {each['mode']}": round(each["median_ms"] / each["count"], 2)
            for each in figures
        }
        best: dict[str, float] = {}
        for each in figures:
            if each["count"] == 1 and each["mode"] != "transformers":
                best[each["pictures"]] = min(
                    each["median_ms"], best.get(each["pictures"], float("inf"))
                )
        stage.figures["target met"] = {
            name: best[name] < bound for name, bound in TARGET_MS.items() if name in best
        }


def run_chats(check: Check) -> None:
    """Chats of eight rounds with a new picture each, the whole history sent again, on a server of
    its own.
    """
    preset = "tiny-qwen3-vl" if check.args.quick else check.args.preset
    sizes = {"160x96": "160x96"} if check.args.quick else RESOLUTIONS
    rounds, answer = ("2", "4") if check.args.quick else ("8", "32")
    names = [f"chat-{name}" for name in sizes]
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as folder, free_port() as port:
        options = (
            "--device",
            device(check),
            "--load-format",
            "dummy",
            "--dtype",
            "bfloat16",
            "--port",
            str(port),
        )
        small = (
            ("--threads", "1", "--media-workers", "1", "--max-total-tokens", "8192")
            if check.args.quick
            else ()
        )
        command = saccade("serve", folder, "--served-model-name", preset, *options, *small)
        if lacking("chat", check.cuda) or check.left < 60:
            for name in names:
                check.begin(name, 60, command)
            return
        subprocess.run(
            saccade("make-checkpoint", "--preset", preset, "--out", folder),
            env=check.environment,
            cwd=ROOT,
            check=True,
        )
        with serving(check, command, port) as why:
            for name, resolution in zip(names, sizes.values()):
                run_chat(check, name, resolution, f"http://127.0.0.1:{port}", (rounds, answer), why)
    for stage in check.stages:
        if stage.name in names:
            stage.command = f"{shlex.join(command)} & {stage.command}"


def run_chat(
    check: Check, name: str, resolution: str, url: str, lengths: tuple[str, str], why: str
) -> None:
    output = check.out / f"{name}.jsonl"
    data = (
        "--dataset-name",
        "multiturn-image",
        "--rounds",
        lengths[0],
        "--num-prompts",
        "2",
        "--max-concurrency",
        "1",
        "--trace",
    )
    shape = (
        "--image-resolution",
        resolution,
        "--random-input-len",
        "100",
        "--random-output-len",
        lengths[1],
    )
    command = saccade(
        "bench", "serve", "--base-url", url, *data, *shape, "--output-file", str(output)
    )
    if why:
        stage = check.begin(name, 0, command)
        stage.status, stage.why = "failed", why
        return
    stage = check.run(name, 25, command, 120)
    if output.is_file():
        requests = [
            each
            for each in map(json.loads, output.read_text().splitlines())
            if each["kind"] == "request"
        ]
        stage.figures = rounds_of(requests)
        if stage.figures["failed requests"]:
            stage.status, stage.why = (
                "failed",
                f"{stage.figures['failed requests']} requests failed",
            )
        if stage.status == "ok":
            last = stage.figures["ttft ms by round"][-1]
            stage.figures["target met"] = (
                None if resolution != "2560x1440" else last < TARGET_TTFT_MS
            )


def rounds_of(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median TTFT of each round, and how many requests failed."""
    by_round: dict[int, list[float]] = {}
    for each in requests:
        if not each.get("failure"):
            by_round.setdefault(each["round"], []).append(each["ttft"])
    failed = sum(bool(each.get("failure")) for each in requests)
    return {
        "ttft ms by round": [
            round(statistics.median(by_round[key]), 1) for key in sorted(by_round)
        ],
        "failed requests": failed,
    }


@contextmanager
def serving(check: Check, command: Sequence[str], port: int) -> Iterator[str]:
    """A server; yields why it did not start, or nothing."""
    print(f"== server: {shlex.join(command)}", flush=True)
    with (check.out / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=check.environment, cwd=ROOT, start_new_session=True
        )
        try:
            until = time.monotonic() + min(180.0, check.left)
            why = "the server was not ready in time"
            while time.monotonic() < until:
                if process.poll() is not None:
                    why = f"the server ended with status {process.returncode} (server.log)"
                    break
                with suppress(OSError, urllib.error.URLError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    why = ""
                    break
                time.sleep(0.3)
            yield why
        finally:
            end(process)


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


def saccade(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "saccade", *arguments]


def device(check: Check) -> str:
    return "cuda" if check.cuda else "cpu"


# ---- where, and what came of it


def hardware() -> dict[str, Any]:
    """Of this machine, as far as it says."""
    import torch

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu cores": os.cpu_count(),
    }
    with suppress(OSError):
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        found["cpu"] = names[0] if names else platform.processor()
        found["memory kB"] = int(Path("/proc/meminfo").read_text().split()[1])
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": card.name,
            "gpus": torch.cuda.device_count(),
            "gpu memory": card.total_memory,
        }
        found |= {
            "compute capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
        }
        with suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(
                query, capture_output=True, text=True, check=True, timeout=20
            ).stdout.split("\n")[0]
    return found


def versions() -> dict[str, str | None]:
    import torch

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "transformers", "numpy", "safetensors", "tokenizers", "msgspec"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
        )
        found["saccade"] = git.stdout.strip()
    return found


def explain_missing(cuda: bool) -> dict[str, list[str]]:
    """What lacks for which stage; said before anything runs, with what to do."""
    found = {stage: absent for stage in NEEDS if (absent := lacking(stage, cuda))}
    if found:
        for stage, absent in found.items():
            print(f"{stage} cannot run: not installed: {', '.join(absent)}")
        names = " ".join(sorted({name for absent in found.values() for name in absent}))
        target = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(
            "Where there is a network:  pip download --no-deps --only-binary=:all: "
            f"--python-version {target} -d wheels {names}"
        )
        print(
            "Here:                      python3 -m pip install --no-index --no-deps --target "
            "site wheels/*.whl; export PYTHONPATH=site"
        )
        print(
            "(a package may need others in turn; each run says what is still missing)", flush=True
        )
    return found


def write_summary(check: Check, facts: dict[str, Any]) -> int:
    """summary.json and a last word; the exit status."""
    failed = [stage for stage in check.stages if stage.status in ("failed", "timed out")]
    skipped = [stage for stage in check.stages if stage.status == "skipped"]
    summary = facts | {
        "seconds": round(check.args.budget - check.left, 1),
        "skipped": {stage.name: stage.why for stage in skipped},
        "failed": {stage.name: stage.why for stage in failed},
        "stages": [asdict(stage) for stage in check.stages],
    }
    (check.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for stage in check.stages:
        print(
            f"{stage.status:>9}  {stage.name:<12} {stage.seconds:>6.1f} s  "
            f"{stage.why or json.dumps(stage.figures)}"
        )
        if stage in failed and stage.tail:
            print("\n".join(f"           | {line}" for line in stage.tail.splitlines()[-15:]))
    well = len(check.stages) - len(failed) - len(skipped)
    print(
        f"{check.out / 'summary.json'}: {well} stages ok, {len(failed)} failed, {len(skipped)} "
        "skipped"
    )
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GPU tests and benchmarks in one command, within a time budget."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for results (%(default)s)"
    )
    parser.add_argument(
        "--budget", type=float, default=525.0, help="seconds for everything (%(default)s)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script out"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few repeats")
    parser.add_argument(
        "--preset", default="qwen3-vl-8b", help="what is served to the chats (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(NEEDS), default=tuple(NEEDS), help="stages to run"
    )
    return parser.parse_args(arguments)


STAGES: dict[str, Callable[[Check], None]] = {
    "tests": run_tests,
    "kernels": run_kernels,
    "encoder": run_encoder,
    "chat": run_chats,
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if missing(("torch",)):
        print("cannot run: torch is not installed for this Python")
        return 2
    absent = explain_missing(args.device == "cuda")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "cannot run: torch sees no CUDA device (--device cpu --quick tries this script out "
            "on tiny models)"
        )
        return 2
    if all(stage in absent for stage in args.only):
        print("cannot run: every stage lacks packages")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(args)
    command = (
        shlex.join([sys.executable, *sys.argv])
        if arguments is None
        else shlex.join(["gpu_check.py", *arguments])
    )
    facts = {
        "command": command,
        "quick": args.quick,
        "hardware": hardware(),
        "versions": versions(),
        "not installed": absent,
    }
    for name in args.only:
        STAGES[name](check)
    return write_summary(check, facts)


if __name__ == "__main__":
    sys.exit(main())
