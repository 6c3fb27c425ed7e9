"""Stage `speed`: tokens per second of decode and prefill, through the scheduler and the worker with
random weights.

Decode is timed after all prompts of 1000 tokens have produced a first token. Its floor is the
memory traffic of a step (weights, and the KV of 1024 tokens per sequence) at the speed of a copy.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import pairwise, product

import torch

from saccade.core.config import Dtype
from saccade.core.options import EngineOptions
from saccade.engine.sizing import kv_page_bytes
from saccade_bench.gpu_check.figures import Figure, FigureFile, run_stage
from saccade_bench.lab.engine_here import EngineHere, EngineModel, make_model

CONTEXT = 1000
"""Tokens per prompt. On average, 1024 are read while 48 are generated."""
STEPS = 48
"""Number of timed steps."""
CHUNK = 8192


DRAWN = {"temperature 1": (1.0, 1.0), "temperature 1, top-p 0.95": (1.0, 0.95)}
"""Temperature and top-p, in addition to greedy sampling."""


def decode(
    engine: EngineHere,
    metric: str,
    rows: int,
    floor: float,
    drawn: tuple[float, float] = (0.0, 1.0),
    *,
    quick: bool,
) -> Figure:
    """Measure tokens per second while `rows` sequences decode without other work."""
    context, steps = (20, 4) if quick else (CONTEXT, STEPS)
    chunks = -(-rows * context // engine.config.chunk_tokens)
    # The first sequences sample a token in each prefill step of the others.
    temperature, top_p = drawn
    requests = [
        engine.request(context, steps + chunks + 4, temperature=temperature, top_p=top_p)
        for _ in range(rows)
    ]
    progress = engine.run(requests)
    begun = max(progress.first.values())
    ticks = (tick for tick in progress.steps if tick.at >= begun and tick.drawn == rows)
    full = [tick.at for tick in ticks][: steps + 1]
    if len(full) < 3:
        raise RuntimeError(f"only {len(full)} steps had all {rows} rows")
    gaps = sorted(1e3 * (after - before) for before, after in pairwise(full))
    speed = rows * (len(full) - 1) / (full[-1] - full[0])
    note = f"step {gaps[len(gaps) // 2]:.2f} ms, longest {gaps[-1]:.2f}, {len(gaps)} steps"
    return Figure(metric, speed, "tok/s", more=True, floor=floor, note=note)


def prefill(engine: EngineHere, metric: str, *, quick: bool) -> Figure:
    """Measure prompt tokens per second, with prompts of one chunk and one output token."""
    chunk = 64 if quick else CHUNK
    engine.run([engine.request(chunk, 1)])  # warm-up
    count = 2 if quick else 8
    began = time.perf_counter()
    engine.run([engine.request(chunk, 1) for _ in range(count)])
    seconds = time.perf_counter() - began
    note = f"{1e3 * seconds / count:.1f} ms a chunk"
    return Figure(metric, count * chunk / seconds, "tok/s", more=True, note=note)


def measure(args: object, file: FigureFile) -> None:
    """Add all figures of one model."""
    device, quick = args.device, args.quick  # type: ignore[attr-defined]
    fp8: bool = args.fp8  # type: ignore[attr-defined]
    preset = "tiny-qwen3-vl" if quick else args.preset  # type: ignore[attr-defined]
    name = f"{preset}{'-fp8' if fp8 else ''}"
    dtype: Dtype = "bfloat16" if device == "cuda" else "float32"
    began = time.perf_counter()
    model = make_model(preset, torch.device(device), getattr(torch, dtype), fp8=fp8)
    loaded = time.perf_counter()
    options = EngineOptions(max_total_tokens=4096) if quick else EngineOptions()
    engine = EngineHere(model, device, dtype, options)
    note = f"of these {loaded - began:.1f} to make the weights, the rest kernels and graphs"
    file.add(Figure(f"start, {name}", time.perf_counter() - began, "s", note=note))
    speed: float = args.copy  # type: ignore[attr-defined]
    batches, drawn = ((1, 2), (2,)) if quick else ((1, 8, 64, 256), (1, 8, 64))
    for rows in batches:
        metric = f"decode, {name}, batch {rows}"
        floor = rows / (step_bytes(model, engine, dtype, rows) / speed)
        work = partial(decode, engine, metric, rows, floor, quick=quick)
        file.attempt(metric, work, unit="tok/s")
    metric = f"prefill, {name}, chunks of {64 if quick else CHUNK}"
    file.attempt(metric, partial(prefill, engine, metric, quick=quick), unit="tok/s")
    for rows, (way, numbers) in () if fp8 else product(drawn, DRAWN.items()):
        metric = f"decode, {name}, batch {rows}, {way}"
        floor = rows / (step_bytes(model, engine, dtype, rows) / speed)
        work = partial(decode, engine, metric, rows, floor, numbers, quick=quick)
        file.attempt(metric, work, unit="tok/s")
    if device == "cuda":
        peak = torch.cuda.max_memory_reserved() / (1 << 30)
        file.add(Figure(f"device memory, {name}", peak, "GiB", note="most that was reserved"))
    engine.worker.close()


def step_bytes(model: EngineModel, engine: EngineHere, dtype: Dtype, rows: int) -> int:
    """Return the bytes that one step reads."""
    size = engine.config.page_size
    token = kv_page_bytes(model.spec, size, dtype) // size
    return model.read_bytes + rows * 1024 * token


def main() -> int:
    return run_stage("speed", __doc__, measure)


if __name__ == "__main__":
    sys.exit(main())
