"""Stage `pauses`: how much longer a step of sequences that decode is while the tower encodes a
large image beside it, by how many parts the encoding comes in. Steps that compute prompts are left
out: they are long for another reason.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from saccade.core.config import Dtype
from saccade.core.options import EngineOptions
from saccade.engine.sizing import tower_budget
from saccade_bench.gpu_check.engine_here import EngineHere, Tick
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.model import RandomModel, make_model

LARGE = 1440, 2560
PARTS: tuple[int | None, ...] = (None, 0, 8, 16, 28, 56)
"""Steps that the encoding of a large image takes. None: as a server has it; 0: one, whatever else
the step does.
"""


def pauses(ticks: list[Tick]) -> tuple[list[float], list[float]]:
    """Milliseconds from one step's end to the next's, of steps that only decode: alone, and beside
    an image that is being encoded. Ascending.
    """
    alone: list[float] = []
    beside: list[float] = []
    for before, tick in pairwise(ticks):
        if tick.prompt or before.prompt or not tick.drawn:
            continue
        (beside if tick.encoding else alone).append(1e3 * (tick.at - before.at))
    return sorted(alone), sorted(beside)


def measure(
    model: RandomModel, args: Any, name: str, parts: int | None, best: dict[str, float]
) -> list[Figure]:
    quick: bool = args.quick
    cuda = args.device == "cuda"
    dtype: Dtype = "bfloat16" if cuda else "float32"
    streams, context, steps, images, every = (2, 20, 40, 2, 8) if quick else (8, 1000, 600, 6, 80)
    size = (96, 160) if quick else LARGE
    budget = None if parts is None else parts and tower_budget(model.spec, parts)
    options = EngineOptions(max_total_tokens=4096 if quick else 1 << 17, max_running_requests=32)
    engine = EngineHere(model, args.device, dtype, options=options, tower_budget=budget)
    requests = [engine.request(context, steps) for _ in range(streams)]
    later = [engine.request(10, 2, image=size) for _ in range(images)]
    engine.run([engine.request(10, 2, image=size)])  # what happens once
    progress = engine.run(requests, later=later, every=every)
    engine.worker.close()
    alone, beside = pauses(progress.steps)
    if not alone or not beside:
        raise RuntimeError(f"{len(alone)} steps alone, {len(beside)} beside an image")
    step, worst = alone[len(alone) // 2], beside[int(0.99 * (len(beside) - 1))]
    best[name] = worst / step
    note = (
        f"{len(beside)} steps, longest {beside[-1]:.1f} ms, median {beside[len(beside) // 2]:.1f}"
    )
    took = sum(progress.encode_ms) / max(1, len(progress.encode_ms))
    return [
        Figure(f"a step alone, {name}", step, "ms"),
        Figure(f"pause, P99, {name}", worst, "ms", note=note),
        Figure(f"an image, {name}", took, "ms", note="on the device, beside steps"),
    ]


def main() -> int:
    args = stage_arguments(__doc__)
    file = FigureFile(args.figures)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    preset = "tiny-qwen3-vl" if args.quick else args.preset
    model = make_model(preset, device, dtype)
    best: dict[str, float] = {}

    def run(name: str, parts: int | None) -> None:
        for figure in measure(model, args, name, parts, best):
            file.add(figure)

    for parts in (None, 0, 4) if args.quick else PARTS:
        name = "as a server has it" if parts is None else f"{parts or 1} parts"
        file.attempt(name, partial(run, name, parts), unit="ms")
    if best:
        name = min(best, key=lambda each: best[each])
        metric = f"pauses of {preset}, best, in decode steps"
        file.add(Figure(metric, best[name], "steps", note=name))
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
