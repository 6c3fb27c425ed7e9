"""`saccade bench encoder`: images per second of the vision tower, by image size and mix, beside
transformers' tower.

Both towers have the same random weights. Ours begins with uint8 pixels, theirs with patches already
normalised: its times are the tower's alone. Runs take turns; figures are medians. Every model and
dtype has a process of its own: leftovers in the allocator would change the next model's times,
transformers' most of all (decision 026).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from saccade.core.config import Dtype, EncoderAttention, EncoderConfig
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Grid
from saccade.engine.sizing import VIT_GRAPH_SIZES
from saccade.families.registry import family_model, load_spec
from saccade.parallel import WHOLE
from saccade.runtime.cuda.graphs import CudaCapture
from saccade.runtime.memory import DTYPES
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.dummy import DummyWeights
from saccade_bench.counted import counted
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.machine import describe, pick_device, run_ms, where
from saccade_bench.lab.options import EncoderBenchOptions
from saccade_bench.lab.presets import PRESETS
from saccade_bench.lab.qwen import grids, qwen
from saccade_bench.lab.results import make_room
from saccade_bench.load.images import parse_size

Way = Callable[[], Sequence[torch.Tensor]]
Mode = Literal["one by one", "packed", "graph", "transformers"]
MIXED = (
    (112, 112),
    (168, 224),
    (224, 168),
    (224, 224),
    (160, 320),
    (256, 192),
    (128, 128),
    (320, 240),
)
"""Heights and widths of the mix of 16 pictures, each taken twice."""


@dataclass(frozen=True, slots=True)
class EncoderFigure:
    """One way to encode one list of images.

    `ms`: each run's. `error`: largest difference from transformers, in its deviations.
    """

    model: str
    dtype: str
    pictures: str
    mode: Mode
    count: int
    tokens: int
    ms: list[float]
    error: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


def bench_encoder(options: EncoderBenchOptions) -> list[EncoderFigure]:
    """Check all options, then measure model after model; each one's table and figures are out
    before the next begins.
    """
    device = pick_device(options.device, options.threads)
    sizes = [parse_size(resolution) for resolution in options.resolutions]
    figures: list[EncoderFigure] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {model: _folder(model, Path(scratch)) for model in dict.fromkeys(options.models)}
        for spec in map(load_spec, folders.values()):
            for width, height in sizes:
                # raises for one that no model takes
                spec.recipe(height, width, spec.pixel_bounds)
        make_room(options, "output_file")
        for (model, folder), dtype in product(folders.items(), options.dtypes):
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                measured = fresh.submit(_measure, options, model, folder, dtype).result()
            Console().print(table(measured, device))
            figures += measured
            if options.output_file:
                options.output_file.write_text(
                    json.dumps(as_json(figures, options, device), indent=1) + "\n"
                )
    return figures


def _folder(model: str, scratch: Path) -> Path:
    """The model's; a preset's is made in `scratch`. Raises ConfigError."""
    if model in PRESETS:
        return make_checkpoint(model, scratch / model)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--models {model}: there is no such folder with a config.json, and known presets "
            f"are {', '.join(PRESETS)}"
        )
    return folder


def _measure(
    options: EncoderBenchOptions, model: str, folder: Path, dtype: Dtype
) -> list[EncoderFigure]:
    """Measure in a process of its own."""
    device = pick_device(options.device, options.threads)
    spec = load_spec(folder, (f"patch_embed={options.patch_embed}",))
    weights = DummyWeights(DTYPES[dtype], device)
    net = family_model(spec).build(weights, WHOLE, WHOLE)
    like = torch.empty(0, dtype=DTYPES[dtype], device=device)
    attention: EncoderAttention = (
        "flash" if device.type == "cuda" and dtype != "float32" else "sdpa"
    )
    positions = PositionCache(spec, net.vision, Metrics())
    eager = PackedEncoder(net, positions, EncoderConfig(attention), like)
    graphs = None
    if attention == "flash":
        graphs = PackedEncoder(
            net, positions, EncoderConfig(attention, VIT_GRAPH_SIZES), like, CudaCapture()
        )
    theirs = None
    if not options.without_transformers and find_spec("transformers"):
        from saccade_bench.lab.peer import TransformersTower

        theirs = TransformersTower(folder, weights, qwen(spec).images)
    cases = _cases(spec, options, device)
    figures, done = [], count(1)
    with counted(f"{model} in {dtype}", len(cases) * (1 + options.repeats), still=True) as tell:
        for name, pixels in cases:
            there = grids(spec, pixels)
            ways: dict[Mode, Way] = {"packed": partial(eager.encode, pixels, there)}
            if len(pixels) > 1:
                ways["one by one"] = partial(_one_by_one, eager, pixels, there)
            if graphs is not None:
                ways["graph"] = partial(graphs.encode, pixels, there)
            if theirs is not None:
                ways["transformers"] = partial(theirs.encode, *theirs.prepare(pixels))
            blank = EncoderFigure(
                model,
                dtype,
                name,
                "packed",
                len(pixels),
                sum(map(spec.num_tokens, there)),
                [],
            )
            figures += _time(
                ways,
                blank,
                options.repeats,
                device,
                lambda: tell(next(done)),
            )
    return figures


def _one_by_one(
    encoder: PackedEncoder, pixels: Sequence[torch.Tensor], there: Sequence[Grid]
) -> list[torch.Tensor]:
    return [encoder.encode([each], [grid])[0] for each, grid in zip(pixels, there)]


def _cases(
    spec: FamilySpec, options: EncoderBenchOptions, device: torch.device
) -> list[tuple[str, list[torch.Tensor]]]:
    rng = np.random.default_rng(1)

    def picture(height: int, width: int) -> torch.Tensor:
        size = spec.recipe(height, width, spec.pixel_bounds).canvas
        return torch.from_numpy(rng.integers(0, 256, (*size, 3), np.uint8)).to(device)

    if not options.resolutions:
        return [("16 mixed", [picture(*size) for size in MIXED * 2])]
    cases = []
    for resolution in options.resolutions:
        width, height = parse_size(resolution)
        one = picture(height, width)
        cases.append((resolution, [one]))
        if options.batch > 1:
            cases.append((f"{options.batch} x {resolution}", [one] * options.batch))
    return cases


def _time(
    ways: dict[Mode, Way],
    blank: EncoderFigure,
    repeats: int,
    device: torch.device,
    ran: Callable[[], None],
) -> list[EncoderFigure]:
    """Each way in turns, after a run that warms up and is compared; `ran` is called after each turn
    of all.
    """
    times: dict[Mode, list[float]] = {mode: [] for mode in ways}
    found = {mode: torch.cat(list(way())).float() for mode, way in ways.items()}
    ran()
    for _ in range(repeats):
        for mode, way in ways.items():
            times[mode].append(run_ms(way, device))
        ran()
    wanted = found.get("transformers")
    figures = []
    for mode, ms in times.items():
        error = None
        if wanted is not None and mode != "transformers":
            error = float((found[mode][:, : wanted.shape[1]] - wanted).abs().max() / wanted.std())
        figures.append(replace(blank, mode=mode, ms=ms, error=error))
    return figures


def speedup(figure: EncoderFigure, figures: Sequence[EncoderFigure]) -> float | None:
    """Speed relative to transformers on the same images; None if not measured."""
    for other in figures:
        same = (other.model, other.dtype, other.pictures) == (
            figure.model,
            figure.dtype,
            figure.pictures,
        )
        if same and other.mode == "transformers" and figure.mode != "transformers":
            return other.median_ms / figure.median_ms
    return None


def table(figures: Sequence[EncoderFigure], device: torch.device) -> Table:
    """For people, of one model and dtype.

    gain: times faster than transformers; error: `EncoderFigure.error`.
    """
    title = f"Vision tower of {figures[0].model} in {figures[0].dtype} on {where(device)}"
    shown = Table(
        "pictures", "how", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    for name in ("ms", "ms each", "per s", "tokens/s", "gain", "error"):
        shown.add_column(name, justify="right")
    for figure in figures:
        ms, gain = figure.median_ms, speedup(figure, figures)
        shown.add_row(
            figure.pictures,
            figure.mode,
            f"{ms:.1f}",
            f"{ms / figure.count:.2f}",
            f"{1e3 * figure.count / ms:.1f}",
            f"{1e3 * figure.tokens / ms:.0f}",
            "" if gain is None else f"{gain:.2f}",
            "" if figure.error is None else f"{figure.error:.1e}",
        )
    return shown


def as_json(
    figures: Sequence[EncoderFigure], options: EncoderBenchOptions, device: torch.device
) -> dict[str, Any]:
    """Every run of every figure, and the conditions."""
    rows = [
        asdict(figure)
        | {"median_ms": figure.median_ms, "times_transformers": speedup(figure, figures)}
        for figure in figures
    ]
    return describe(device) | {"patch_embed": options.patch_embed, "figures": rows}
