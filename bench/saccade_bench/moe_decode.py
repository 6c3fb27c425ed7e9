"""Decode steps of a small Qwen3-VL-MoE, beside transformers on the same checkpoint, in turns in one
process.

    python -m saccade_bench.moe_decode [--rows 1 8] [--rounds 15] [--threads 1] [--dtype bfloat16]
        [--preset cut-qwen3-vl-30b-a3b] [--int8] [--json FILE]

Weights are random. Each step is the whole language model (layers, last norm, head) over a context
of `--context` tokens; no vision tower, no scheduler, no HTTP. CPU time is the process's, which what
else the machine does disturbs less than the clock; the machine's load is written down beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from saccade.core.config import QuantizationMode
from saccade.families.registry import load_spec
from saccade.runtime.memory import DTYPES, allocate_caches, keys_and_values
from saccade.runtime.weights import load_net
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.quantised_decode import PAGE, batch_of, step

Step = Callable[[], tuple[float, float]]
"""Milliseconds of the process's CPU time, and of the clock."""


def ours(
    folder: Path, rows: int, context: int, dtype: torch.dtype, mode: QuantizationMode = "auto"
) -> Step:
    spec, device = load_spec(folder), torch.device("cpu")
    net: Any = load_net(spec, folder, dtype=dtype, device=device, quantization=mode)
    pages = 2 + rows * -(-(context + 1) // PAGE)
    caches = keys_and_values(allocate_caches(spec.kv_spec(), pages, PAGE, dtype, device))
    for keys, values in caches.values():
        keys.zero_()
        values.zero_()
    batch = batch_of(rows, context, spec.embedding_width)
    return lambda: step(net.text, caches, batch)


def theirs(folder: Path, rows: int, context: int, dtype: torch.dtype) -> Step:
    kind: Any = transformers.Qwen3VLMoeForConditionalGeneration
    model = kind.from_pretrained(folder, dtype=dtype).eval()
    tokens = torch.randint(5, 500, (rows, context), generator=torch.Generator().manual_seed(0))
    cache = model(input_ids=tokens, use_cache=True).past_key_values

    def run() -> tuple[float, float]:
        start = time.process_time(), time.perf_counter()
        model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        took = time.process_time() - start[0], time.perf_counter() - start[1]
        cache.crop(-1)
        return 1000 * took[0], 1000 * took[1]

    return run


def report(times: Mapping[str, Sequence[tuple[float, float]]], rows: int) -> dict[str, Any]:
    """Medians and least, and how many times transformers' tokens per second each way has."""

    def middle(way: str) -> list[float]:
        return [statistics.median(one[axis] for one in times[way]) for axis in (0, 1)]

    def least(way: str) -> list[float]:
        return [min(one[axis] for one in times[way]) for axis in (0, 1)]

    figures: dict[str, Any] = {}
    for way in times:
        cpu, wall = middle(way)
        figures[f"{way}, {rows} rows"] = {
            "cpu_ms": round(cpu, 2),
            "least_cpu_ms": round(least(way)[0], 2),
            "wall_ms": round(wall, 2),
            "least_wall_ms": round(least(way)[1], 2),
            "tokens_per_cpu_second": round(1000 * rows / cpu, 1),
        }
    for way in times:
        if way != "transformers":
            ratios = {
                "cpu": middle("transformers")[0] / middle(way)[0],
                "least_cpu": least("transformers")[0] / least(way)[0],
                "wall": middle("transformers")[1] / middle(way)[1],
                "least_wall": least("transformers")[1] / least(way)[1],
            }
            figures[f"{way}: times transformers, {rows} rows"] = {
                name: round(ratio, 2) for name, ratio in ratios.items()
            }
    return figures


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype]
    figures: dict[str, Any] = {"load before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(args.preset, Path(name) / "model", dtype=dtype)
        for rows in args.rows:
            ways = {
                "saccade": ours(folder, rows, args.context, dtype),
                "transformers": theirs(folder, rows, args.context, dtype),
            }
            if args.int8:
                ways["saccade int8"] = ours(folder, rows, args.context, dtype, "int8")
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for index in range(args.rounds + 2):
                for way, run in ways.items():
                    took = run()
                    if index > 1:  # the first rounds warm up
                        times[way].append(took)
            figures |= report(times, rows)
    return figures | {"load after": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small-qwen3-vl-moe")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--int8", action="store_true", help="measure --quantization int8 too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    said = {
        "settings": {name: str(value) for name, value in vars(args).items() if name != "json"},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "figures": measure(args),
    }
    text = json.dumps(said, indent=1)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
