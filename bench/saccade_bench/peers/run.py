"""Compare Saccade with other servers on one checkpoint. All run at once, and are measured in turns.

    python -m saccade_bench.peers.run CHECKPOINT \
        --saccade "int8=--quantization int8 --speculative off" [--saccade ...] \
        --beside "NAME=COMMAND" [--beside ...] [--repeats 3] [--core 1] [--output FOLDER]

CHECKPOINT is a folder or "demo". Each `--saccade` adds a Saccade server with a name and options.
Each COMMAND starts an OpenAI-compatible server. {folder}, {port}, {name} and {threads} are
replaced. In each repeat, each workload is sent to one server after another. Each waits until the
previous server is idle, because some continue to compute after their answers. The workloads are:

    cold     a new 1280x720 image and 64 tokens of text: ms to the first token
    again    a repeated request: ms to the first token
    row      one answer of 128 sampled tokens at a time: ms per token
    rows     eight such answers at a time: ms per token of each
    prefill  1,500 tokens of text: ms to the first token
    chat     eight rounds, a new image in each: ms to the first token of the eighth
    load     16 requests with a new image each, four at a time: requests per second

Prints a table with median, minimum and maximum of each, and one with the CPU seconds of each server
and its child processes. `runs.jsonl` has every request, `table.md` the tables, machine and commit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from saccade.ipc.python import python_command
from saccade_bench.image_files import image_part
from saccade_bench.lab.machine import describe
from saccade_bench.load.images import DrawnImage, encode
from saccade_bench.load.measure import tpot, ttft
from saccade_bench.load.serve import Bench, Measured, serve
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    TargetOptions,
    TextOptions,
)
from saccade_bench.started import Side, StartedServer, cpu_seconds, running

ROOT = Path(__file__).parents[3]
SAMPLED = json.dumps({"temperature": 1.0, "top_p": 0.95, "seed": 1})
REST, RESTING = 0.5, 0.04
"""Seconds between two samples, and the maximum CPU usage of an idle server between them."""
MAX_REST = 15.0
NEW_IMAGES = DatasetOptions()
PHOTO = ImageOptions(image_resolution="1280x720", image_content="photo")
FIRST = TextOptions(random_input_len=64, random_output_len=1)
"""One token, so that no server delays the first text until a character is complete."""
QUESTION = TextOptions(random_input_len=64, random_output_len=32)
ROW = TextOptions(random_input_len=64, random_output_len=128)


def first_tokens(measured: Measured) -> list[float]:
    return [ttft(record) for record in measured.run.records if record.reply.failure is None]


def last_round(measured: Measured) -> list[float]:
    records = [record for record in measured.run.records if record.reply.failure is None]
    last = max((record.round for record in records), default=0)
    return [ttft(record) for record in records if record.round == last]


def per_token(measured: Measured) -> list[float]:
    times = [tpot(record) for record in measured.run.records if record.reply.failure is None]
    return [time for time in times if time is not None]


def per_second(measured: Measured) -> list[float]:
    return [measured.summary.throughput.requests]


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """Requests, and how their results are computed. For rates, higher is better."""

    unit: str
    load: LoadOptions
    values: Callable[[Measured], list[float]]
    data: DatasetOptions = NEW_IMAGES
    images: ImageOptions = PHOTO
    text: TextOptions = QUESTION
    extra: str = "{}"

    @property
    def is_rate(self) -> bool:
        return self.values is per_second


NO_IMAGE = replace(PHOTO, image_count=0)
WORKLOADS = {
    "cold": PeerWorkload("ms", LoadOptions(3, 1), first_tokens, text=FIRST),
    "again": PeerWorkload(
        "ms",
        LoadOptions(6, 1, warmup_requests=2),
        first_tokens,
        DatasetOptions("custom"),
        text=FIRST,
    ),
    "row": PeerWorkload(
        "ms/token", LoadOptions(3, 1), per_token, images=NO_IMAGE, text=ROW, extra=SAMPLED
    ),
    "rows": PeerWorkload(
        "ms/token", LoadOptions(8, 8), per_token, images=NO_IMAGE, text=ROW, extra=SAMPLED
    ),
    "prefill": PeerWorkload(
        "ms",
        LoadOptions(2, 1),
        first_tokens,
        images=NO_IMAGE,
        text=TextOptions(1500, random_output_len=1),
    ),
    "chat": PeerWorkload("ms", LoadOptions(1, 1), last_round, DatasetOptions("multiturn-image")),
    "load": PeerWorkload("1/s", LoadOptions(16, 4), per_second),
}


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The results of one workload on one server in one repeat, and the CPU seconds used."""

    side: str
    workload: str
    values: tuple[float, ...]
    cpu: float


def sides(folder: Path, name: str, args: argparse.Namespace) -> list[Side]:
    core = f"taskset -c {args.core} " if args.core is not None else ""
    words = {"folder": shlex.quote(str(folder)), "name": name, "threads": args.threads}
    found = []
    for text in args.beside:
        label, _, command = text.partition("=")
        found.append(Side(label, core + command.format(port="{port}", **words)))
    own = (
        f"{core}{shlex.join(python_command('saccade'))} serve {words['folder']} --port {{port}} "
        f"--served-model-name {name} --threads {args.threads} "
    )
    for text in args.saccade:
        label, _, options = text.partition("=")
        found.append(Side(f"Saccade {label}".strip(), own + options))
    return found


def write_request(path: Path, seed: int) -> None:
    """Write the request that the workload "again" repeats."""
    content = [
        image_part(encode(DrawnImage("photo", 1280, 720, seed)), "image/jpeg"),
        {"type": "text", "text": "What does the picture show? " * 8},
    ]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")


def wait_for_rest(server: StartedServer) -> None:
    """Wait until a server is idle, or `MAX_REST` seconds have passed."""
    before, last = cpu_seconds(server.pid), time.monotonic() + MAX_REST
    while time.monotonic() < last:
        time.sleep(REST)
        now = cpu_seconds(server.pid)
        if now - before < RESTING * REST:
            return
        before = now


def measure(
    name: str, seed: int, side: str, server: StartedServer, runs: Path, again: Path
) -> PeerResult:
    """Run a workload on a server. The seed must be new, so that its images are."""
    workload = WORKLOADS[name]
    data = workload.data
    if data.dataset_name == "custom":
        data = replace(data, dataset_path=str(again))
    bench = Bench(
        TargetOptions(base_url=server.url, extra_request_body=workload.extra),
        replace(workload.load, seed=seed),
        data,
        workload.images,
        workload.text,
        output=OutputOptions(runs, f"{side}: {name}", quiet=True),
    )
    before = cpu_seconds(server.pid)
    measured = serve(bench)
    wait_for_rest(server)
    return PeerResult(
        side, name, tuple(workload.values(measured)), cpu_seconds(server.pid) - before
    )


def table(results: Sequence[PeerResult]) -> list[str]:
    """Return both tables as Markdown. The ratio compares the best medians of peers and Saccade."""
    labels = list(dict.fromkeys(result.side for result in results))
    names = [name for name in WORKLOADS if any(result.workload == name for result in results)]

    def of(name: str, label: str) -> list[PeerResult]:
        return [r for r in results if (r.workload, r.side) == (name, label)]

    lines = [f"| | {' | '.join(labels)} | ours ahead |", "|---|" + "---|" * (len(labels) + 1)]
    for name in names:
        workload, cells = WORKLOADS[name], list[str]()
        ours, peers = list[float](), list[float]()
        for label in labels:
            values = [value for result in of(name, label) for value in result.values]
            if not values:
                cells.append("-")
                continue
            middle = median(values)
            (ours if label.startswith("Saccade") else peers).append(middle)
            cells.append(f"{middle:.4g} ({min(values):.4g} to {max(values):.4g})")
        ahead = "-"
        if ours and peers:
            best = max if workload.is_rate else min
            ratio = best(peers) / best(ours)
            ahead = f"{1 / ratio if workload.is_rate else ratio:.2f}"
        lines.append(f"| {name}, {workload.unit} | {' | '.join(cells)} | {ahead} |")
    lines += ["", f"| CPU s, least | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    for name in names:
        least = [min((r.cpu for r in of(name, label)), default=float("nan")) for label in labels]
        lines.append(f"| {name} | {' | '.join(f'{cpu:.2f}' for cpu in least)} |")
    return lines


def commit() -> str:
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return git.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--saccade", action="append", default=[], help="NAME=options of serve")
    parser.add_argument("--beside", action="append", default=[], help="NAME=COMMAND")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="per server")
    parser.add_argument("--core", type=int, help="bind every server to this core")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds, of each server")
    parser.add_argument("--output", type=Path, default=Path("bench/results/peers"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    demo = ROOT / "saccade" / "demo" / "model"
    folder = demo if args.checkpoint == "demo" else Path(args.checkpoint)
    heading = (
        f"{Path(args.checkpoint).name}, {describe()['cpu']}, {args.threads} threads each, "
        f"{args.repeats} repeats, {commit()}, `{shlex.join(sys.argv[1:])}`"
    )
    lines: list[str] = []
    results: list[PeerResult] = []
    with ExitStack() as stack:
        again = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "again.jsonl"
        servers = {}
        for side in sides(folder, Path(args.checkpoint).name, args):
            console.print(f"starting {side.label}")
            servers[side.label] = stack.enter_context(
                running(side, args.output, args.start_timeout)
            )
        for repeat in range(args.repeats):
            write_request(again, repeat)
            for place, name in enumerate(args.workloads):
                for label, server in servers.items():
                    console.print(f"repeat {repeat + 1} of {args.repeats}: {name}: {label}")
                    seed = 1 + 1000 * place + repeat
                    runs = args.output / "runs.jsonl"
                    results.append(measure(name, seed, label, server, runs, again))
                lines = [heading, "", *table(results)]  # every time, in case the run is interrupted
                (args.output / "table.md").write_text("\n".join(lines) + "\n")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
