"""Saccade beside transformers' `generate` on one checkpoint: speed and accuracy, in turns.

    python -m benchmarks.peers.run [CHECKPOINT] [--repeats 3] [--dtype bfloat16] [--threads 2]
    [--output benchmarks/results/NAME]

CHECKPOINT is a folder, "demo" (the built-in model) or "random" (a small Qwen3-VL with random
weights). Each repeat starts a fresh server of either kind, so every first request is cold, and
sends both the same four workloads:

    cold     single requests, a new 1280x720 picture each: TTFT without any cache, decode speed
    again    one and the same request over and over: what a known request costs
    chat     8 rounds at 1280x720, a new picture each round, all earlier ones sent again
    load     16 requests, 4 at a time

Writes `runs.jsonl` and the report. Nothing here is special to either server.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from saccade.tools.ab import Side, running
from saccade.tools.bench.images import DrawnImage, data_url, encode
from saccade.tools.bench.journal import write_eval
from saccade.tools.bench.serve import Bench, serve
from saccade.tools.eval.run import evaluate
from saccade.tools.options import (
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
from saccade.tools.report.report import report

ROOT = Path(__file__).parent.parent.parent
SIZE = "1280x720"


def sides(folder: Path, name: str, dtype: str, threads: int | None) -> tuple[Side, Side]:
    settings = f"--port {{port}} --dtype {dtype} --served-model-name {name}" + (
        f" --threads {threads}" if threads else ""
    )
    place = shlex.quote(str(folder))
    peer = shlex.quote(str(Path(__file__).with_name("transformers_server.py")))
    python = shlex.quote(sys.executable)
    return (
        Side("transformers", f"{python} {peer} {place} {settings}"),
        Side("saccade", f"{python} -m saccade serve {place} {settings}"),
    )


def workloads(
    seed: int, output: OutputOptions, target: TargetOptions, again: Path
) -> Iterator[Bench]:
    """The four, for one server."""
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
        LoadOptions(2, 1, warmup_requests=0, seed=seed + 500),
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


@contextmanager
def checkpoint(name: str) -> Iterator[Path]:
    if name == "random":
        from benchmarks.generate import ROPE, TEXT, VISION
        from tests.checkpoints import make_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            yield make_checkpoint(
                Path(folder), "qwen3_vl", text=TEXT | {"rope_parameters": ROPE}, vision=VISION
            )
    else:
        yield ROOT / "saccade" / "demo" / "model" if name == "demo" else Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--questions", type=int, default=100, help="of each eval, asked once (demo model only)"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = args.output / "runs.jsonl"
    console = Console(highlight=False)
    with checkpoint(args.checkpoint) as folder, tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch) / "again.jsonl"
        write_request(again)
        for repeat in range(args.repeats):
            for side in sides(folder, Path(args.checkpoint).name, args.dtype, args.threads):
                console.print(f"repeat {repeat + 1} of {args.repeats}: {side.label}")
                with running(side, Path(scratch), AbOptions("", "")) as url:
                    target = TargetOptions(base_url=url)
                    for bench in workloads(
                        repeat + 1, OutputOptions(runs, side.label), target, again
                    ):
                        serve(bench)
                    for name in (
                        ("ocr", "shapes") if repeat == 0 and args.checkpoint == "demo" else ()
                    ):
                        write_eval(
                            runs,
                            side.label,
                            evaluate(name, target, EvalOptions(num_prompts=args.questions)),
                        )
    console.print(
        report(
            [runs],
            ReportOptions(
                args.output, f"Saccade beside transformers: {args.checkpoint}, {args.dtype}"
            ),
        )
    )


if __name__ == "__main__":
    main()
