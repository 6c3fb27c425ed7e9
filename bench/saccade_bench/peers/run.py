"""Saccade beside another server on one checkpoint: speed and accuracy, in turns.

    python -m saccade_bench.peers.run CHECKPOINT --beside NAME=COMMAND [--repeats 3]
    [--dtype bfloat16] [--threads 2] [--output bench/results/NAME] [--int8]

CHECKPOINT is a folder or "demo", the built-in model. Each repeat starts a fresh server of either
kind, so every first request is cold, and sends both the same four workloads:

    cold     single requests, a new 1280x720 picture each: TTFT without any cache, decode speed
    again    one and the same request over and over: what a known request costs
    chat     8 rounds at 1280x720, a new picture each round, all earlier ones sent again
    load     16 requests, 4 at a time

COMMAND starts an OpenAI-compatible server, with {folder}, {port}, {name}, {dtype} and {threads} in
it; --int8 adds a third side, Saccade in 8 bits.

Writes `runs.jsonl`, the report, and `cpu.jsonl`: the CPU time that the server and all that it
started took for each workload, which what else the machine does disturbs less than the clock.
Nothing here is special to any server.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console

from saccade_bench.ab import Side, running
from saccade_bench.eval.run import evaluate
from saccade_bench.load.images import DrawnImage, data_url, encode
from saccade_bench.load.journal import write_eval
from saccade_bench.load.serve import Bench, serve
from saccade_bench.options import (
    AbOptions,
    DatasetOptions,
    EvalOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    ReportOptions,
    TargetOptions,
    TextOptions,
)
from saccade_bench.report.report import report

ROOT = Path(__file__).parents[3]
SIZE = "1280x720"
WORKLOADS = ("cold", "again", "chat", "load")


def sides(folder: Path, name: str, args: argparse.Namespace) -> list[Side]:
    settings = f"--port {{port}} --dtype {args.dtype} --served-model-name {name}" + (
        f" --threads {args.threads}" if args.threads else ""
    )
    place = shlex.quote(str(folder))
    python = shlex.quote(sys.executable)
    label, _, command = args.beside.partition("=")
    told = {"folder": place, "name": name, "dtype": args.dtype, "threads": args.threads or ""}
    peer = Side(label, command.format(port="{port}", **told))
    saccade = f"{python} -m saccade serve {place} {settings}"
    own = [Side("saccade", saccade)]
    if args.int8:
        own.append(Side("saccade int8", f"{saccade} --quantization int8"))
    return [peer, *own]


def workloads(
    seed: int, output: OutputOptions, target: TargetOptions, again: Path, chats: int
) -> Iterator[Bench]:
    """The four of WORKLOADS, for one server."""
    pictures = ImageOptions(image_resolution=SIZE, image_content="photo")
    text = TextOptions(random_input_len=64, random_output_len=64)

    def bench(load: LoadOptions, data: DatasetOptions) -> Bench:
        return Bench(target, load, data, pictures, text, output=output)

    yield bench(LoadOptions(4, 1, warmup_requests=2, seed=seed), DatasetOptions())
    yield bench(
        LoadOptions(6, 1, warmup_requests=1, seed=seed),
        DatasetOptions(dataset_name="custom", dataset_path=str(again)),
    )
    # Seeds of their own: no workload may find pictures that another has sent.
    yield bench(
        LoadOptions(chats, 1, warmup_requests=0, seed=seed + 500),
        DatasetOptions(dataset_name="multiturn-image", rounds=8),
    )
    yield bench(
        LoadOptions(16, 4, warmup_requests=0, seed=seed + 1000),
        DatasetOptions(dataset_name="image"),
    )


def write_request(path: Path) -> None:
    """The request that is sent again and again."""
    url = data_url(encode(DrawnImage("photo", 1280, 720, 77)), "jpeg")
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What does the picture show? " * 8},
    ]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")


def cpu_seconds() -> float:
    """CPU time of all running children of this process, with their ended children."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def measure_side(side: Side, repeat: int, again: Path, args: argparse.Namespace) -> None:
    """All workloads against a fresh server."""
    runs = args.output / "runs.jsonl"
    with running(side, again.parent, AbOptions("", "", start_timeout=args.start_timeout)) as url:
        target = TargetOptions(base_url=url)
        benches = workloads(repeat + 1, OutputOptions(runs, side.label), target, again, args.chats)
        for workload, bench in zip(WORKLOADS, benches):
            before, load = cpu_seconds(), os.getloadavg()[0]
            serve(bench)
            line = {
                "label": side.label,
                "workload": workload,
                "repeat": repeat + 1,
                "cpu_s": round(cpu_seconds() - before, 2),
                "load": round(load, 1),
            }
            with (args.output / "cpu.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        for name in ("ocr", "shapes") if repeat == 0 and args.checkpoint == "demo" else ():
            options = EvalOptions(num_prompts=args.questions)
            write_eval(runs, side.label, evaluate(name, target, options))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--questions", type=int, default=100, help="of each eval, asked once (demo model only)"
    )
    parser.add_argument("--chats", type=int, default=2, help="of 8 rounds each, one at a time")
    parser.add_argument("--beside", required=True, help="NAME=COMMAND of the other server")
    parser.add_argument("--int8", action="store_true", help="Saccade in 8 bits too")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds, of each server")
    parser.add_argument("--output", type=Path, default=Path("bench/results/peers"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = args.output / "runs.jsonl"
    peer = args.beside.partition("=")[0]
    console = Console(highlight=False)
    demo = ROOT / "saccade" / "demo" / "model"
    folder = demo if args.checkpoint == "demo" else Path(args.checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch) / "again.jsonl"
        write_request(again)
        for repeat in range(args.repeats):
            for side in sides(folder, Path(args.checkpoint).name, args):
                console.print(f"repeat {repeat + 1} of {args.repeats}: {side.label}")
                measure_side(side, repeat, again, args)
    console.print(
        report(
            [runs],
            ReportOptions(
                args.output,
                f"Saccade beside {peer}: {Path(args.checkpoint).name}, {args.dtype}",
            ),
        )
    )


if __name__ == "__main__":
    main()
