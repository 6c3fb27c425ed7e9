"""Stage `profile`: a kernel-by-kernel profile of steps of Qwen3-VL-8B: number and duration of each
kernel, and idle time of the device between kernels. Covers greedy and sampled decode, a prefill
chunk, prefill with a long prefix, and decode with FP8 weights. The language model only has a few
layers, because all are alike.

Writes profile.md next to its figures.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.core.config import Dtype
from saccade.core.options import EngineOptions
from saccade.core.plan import Plan
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.lab.engine_here import EngineHere, make_model

LAYERS = 4
STEPS = 12
"""Number of recorded steps."""
TOP = 25
"""Number of kernels listed."""
WIDEST_NAME = 90


@dataclass(frozen=True, slots=True)
class Span:
    """The execution of a kernel, in microseconds on the profiler's clock."""

    name: str
    begin: float
    end: float


def busy_us(spans: Sequence[Span]) -> float:
    """Return the microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


def gaps_of(spans: Sequence[Span]) -> dict[str, list[float]]:
    """Return the microseconds of each idle gap, by the kernel that ends it."""
    found: dict[str, list[float]] = defaultdict(list)
    until = float("inf")
    for span in sorted(spans, key=lambda each: each.begin):
        if span.begin > until:
            found[span.name].append(span.begin - until)
        until = span.end if until == float("inf") else max(until, span.end)
    return found


def record(
    engine: EngineHere, rows: int, context: int, temperature: float, *, cuda: bool
) -> list[Span]:
    """Return the kernels that ran while `rows` sequences decoded."""
    # The first sequences sample a token in each prefill step of the others.
    chunks = -(-rows * context // engine.config.chunk_tokens)
    requests = [
        engine.request(context, STEPS + chunks + 4, temperature=temperature) for _ in range(rows)
    ]
    recorder = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    drawing: set[str] = set()
    steps = 0

    def watch(_: Plan, names: Sequence[str]) -> None:
        nonlocal steps
        drawing.update(names)
        if len(drawing) < rows:
            return
        if not steps:
            recorder.start()
        elif steps == STEPS:
            if cuda:
                torch.cuda.synchronize()
            recorder.stop()
        steps += 1

    engine.run(requests, watch)
    return spans_of(recorder, cuda=cuda)


def record_chunk(engine: EngineHere, tokens: int, prefix: int, *, cuda: bool) -> list[Span]:
    """Return the kernels of a prompt's last chunk of `tokens` tokens, after a prefix of full
    chunks.
    """
    assert prefix % engine.config.chunk_tokens == 0 and tokens <= engine.config.chunk_tokens
    recorder = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    steps = 0

    def watch(_plan: Plan, _names: Sequence[str]) -> None:
        nonlocal steps
        steps += 1
        if steps == prefix // engine.config.chunk_tokens:
            recorder.start()

    if not prefix:
        recorder.start()
    engine.run([engine.request(prefix + tokens, 1)], watch, in_flight=1)
    if cuda:
        torch.cuda.synchronize()
    recorder.stop()
    return spans_of(recorder, cuda=cuda)


def spans_of(recorder: profile, *, cuda: bool) -> list[Span]:
    wanted = "CUDA" if cuda else "CPU"
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in recorder.events() or ()
        if event.device_type.name == wanted
    ]


def table(title: str, spans: Sequence[Span], steps: int) -> Iterator[str]:
    """Yield the lines of tables with the kernels by time, and with idle gaps."""
    total = busy_us(spans)
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span.end - span.begin)
    yield f"## {title}"
    yield ""
    yield "| kernel | a step | us each | us a step | share |"
    yield "|---|---|---|---|---|"
    for name, times in sorted(by_name.items(), key=lambda each: -sum(each[1]))[:TOP]:
        spent = sum(times)
        cells = (
            f"`{name[:WIDEST_NAME].replace('|', '/')}`",
            f"{len(times) / steps:.1f}",
            f"{spent / len(times):.1f}",
            f"{spent / steps:.1f}",
            f"{100 * spent / max(total, 1e-9):.1f} %",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| waits before | a step | us a step |"
    yield "|---|---|---|"
    gaps = sorted(gaps_of(spans).items(), key=lambda each: -sum(each[1]))
    for name, times in gaps[:10]:
        short = name[:WIDEST_NAME].replace("|", "/")
        yield f"| `{short}` | {len(times) / steps:.1f} | {sum(times) / steps:.1f} |"
    yield ""


def measure(
    work: Callable[[], list[Span]], metric: str, steps: int, args: Any, file: FigureFile
) -> None:
    """Add figures for the kernels that `work` records, and write its tables."""
    spans = work()
    if not spans:
        raise RuntimeError("the profiler recorded nothing")
    span = max(each.end for each in spans) - min(each.begin for each in spans)
    share = 100 * busy_us(spans) / span
    note = f"{span / steps:.0f} us a step, profiler's own cost included"
    title = f"{metric}, share of the step in which the GPU computes"
    file.add(Figure(title, share, "%", more=True, floor=100.0, note=note))
    kernels = len(spans) / steps
    file.add(Figure(f"{metric}, kernels a step", kernels, "kernels", note="of all layers"))
    with Path(args.figures).with_name("profile.md").open("a") as out:
        out.write("\n".join(table(metric, spans, steps)) + "\n")


def build(args: Any, *, fp8: bool = False) -> tuple[EngineHere, str]:
    cuda, quick = args.device == "cuda", args.quick
    dtype: Dtype = "bfloat16" if cuda else "float32"
    preset = "tiny-qwen3-vl" if quick else args.preset
    model = make_model(
        preset, torch.device(args.device), getattr(torch, dtype), layers=LAYERS, fp8=fp8
    )
    options = EngineOptions(max_total_tokens=4096 if quick else 1 << 18, max_running_requests=64)
    engine = EngineHere(model, args.device, dtype, options)
    return engine, f"{preset}{'-fp8' if fp8 else ''}, {LAYERS} layers"


def main() -> int:
    args = stage_arguments(__doc__)
    file = FigureFile(args.figures)

    def work() -> None:
        if args.device == "cuda":
            with profile(activities=[ProfilerActivity.CUDA]):  # initialize the profiler
                torch.ones(1, device="cuda").add_(1)
        engine, name = build(args)
        engine.run([engine.request(20, 4)])  # warm-up
        cuda = args.device == "cuda"
        context = 20 if args.quick else 1000
        prompts = ((20, 0),) if args.quick else ((8192, 0), (3700, 3 * 8192))
        batches = (2,) if args.quick else (1, 64)
        works: dict[str, tuple[Callable[[], list[Span]], int]] = {
            f"batch {rows}{way}": (
                partial(record, engine, rows, context, temperature, cuda=cuda),
                STEPS,
            )
            for rows in batches
            for way, temperature in (("", 0.0), (", temperature 1", 1.0))
        }
        for tokens, prefix in prompts:
            last = partial(record_chunk, engine, tokens, prefix, cuda=cuda)
            works[f"{tokens} tokens over {prefix + tokens}"] = last, 1
        for title, (recorded, steps) in works.items():
            metric = f"profile, {name}, {title}"
            file.attempt(metric, partial(measure, recorded, metric, steps, args, file))
        engine.worker.close()

    def work_fp8() -> None:
        engine, name = build(args, fp8=True)
        engine.run([engine.request(20, 4)])
        context, cuda = 20 if args.quick else 1000, args.device == "cuda"
        metric = f"profile, {name}, batch 1"
        measure(partial(record, engine, 1, context, 0.0, cuda=cuda), metric, STEPS, args, file)
        engine.worker.close()

    file.attempt("profile", work)
    file.attempt("profile with FP8 weights", work_fp8)
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
