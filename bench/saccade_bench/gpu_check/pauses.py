"""Stage `pauses`: how much longer a step of sequences that decode is while the tower encodes a
large image beside it, by how many parts the encoding comes in. Steps that compute prompts are left
out: they are long for another reason.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from saccade.core.config import Dtype
from saccade.core.options import EngineOptions
from saccade.engine.sizing import tower_budget
from saccade_bench.gpu_check.engine_here import EngineHere, Tick
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.model import RandomModel, make_model

LARGE = 1440, 2560
PARTS: tuple[int | None, ...] = (None, 0)
"""Steps that the encoding of a large image takes. None: as a server has it; 0: one, whatever else
the step does. Each is an engine of its own, which takes a quarter of a minute to start.
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


def percentile(values: Sequence[float], share: float) -> float:
    """The least that `share` percent of them do not exceed: of few the largest."""
    return float(np.percentile(values, share, method="inverted_cdf"))


def measure(
    model: RandomModel,
    args: Any,
    name: str,
    parts: int | None,
    found: dict[str, tuple[float, float]],
) -> list[Figure]:
    """found: by name, (P99 of pauses, a step alone)."""
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
    step, worst = percentile(alone, 50), percentile(beside, 99)
    found[name] = worst, step
    note = f"{len(beside)} steps, longest {beside[-1]:.1f} ms, median {percentile(beside, 50):.1f}"
    took = sum(progress.encode_ms) / max(1, len(progress.encode_ms))
    return [
        Figure(f"a step alone, {name}", step, "ms"),
        Figure(f"pause, P99, {name}", worst, "ms", note=note),
        Figure(f"an image, {name}", took, "ms", note="on the device, beside steps"),
    ]


def name_of(parts: int | None) -> str:
    if parts is None:
        return "as a server has it"
    return f"{parts} parts" if parts > 1 else "1 part"


def shortest(found: Mapping[str, tuple[float, float]]) -> tuple[str, float]:
    """Of (P99 of pauses, a step alone) by name: whose pauses are shortest, and how many steps they
    are. The step alone is that of all, for nothing of an encoding is in it.
    """
    name = min(found, key=lambda each: found[each])
    return name, found[name][0] / percentile([step for _, step in found.values()], 50)


def main() -> int:
    args = stage_arguments(__doc__)
    file = FigureFile(args.figures)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    preset = "tiny-qwen3-vl" if args.quick else args.preset
    model = make_model(preset, device, dtype)
    found: dict[str, tuple[float, float]] = {}

    def run(name: str, parts: int | None) -> None:
        for figure in measure(model, args, name, parts, found):
            file.add(figure)

    for parts in PARTS:
        name = name_of(parts)
        file.attempt(name, partial(run, name, parts), unit="ms")
    if found:
        name, steps = shortest(found)
        metric = f"pauses of {preset}, best, in decode steps"
        file.add(Figure(metric, steps, "steps", note=name))
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
