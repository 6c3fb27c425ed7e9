"""`saccade bench kernels`: the rotary embedding by memory speed, and the positions of images,
beside the usual ways.

Rotary embedding: queries and keys of a tower turned in place, beside transformers' chain of float32
operations, and beside a plain copy: the bound. All are credited with reading and writing queries
and keys once. On a GPU several calls follow each other: a single call would be over before the next
launch.

Positions: the values that follow from a grid alone (rotary angles, learned positions, window order,
mRoPE), for a new and for a seen grid, beside transformers, which computes them at every call. Runs
take turns; figures are medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from saccade.core.config import Dtype
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Image, ImageKey, Span
from saccade.families.registry import family_model, load_spec
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.rotary import Rotation, rotary_tables, section_axes
from saccade.parallel import WHOLE
from saccade.runtime.dummy import DummyWeights
from saccade.runtime.memory import DTYPES
from saccade.runtime.positions import PositionCache
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.machine import describe, pick_device, run_ms, where
from saccade_bench.lab.options import KernelBenchOptions
from saccade_bench.lab.presets import PRESETS
from saccade_bench.lab.results import make_room
from saccade_bench.load.images import parse_size

if TYPE_CHECKING:
    from saccade_bench.lab.peer import TransformersPositions

Work = Callable[[], object]
Tower = Literal["vision", "text"]
Way = Literal["new grid", "seen grid", "transformers"]

TEXT = 64
"""Tokens before a picture, and after it."""
CUDA_CALLS = 10
"""Calls of one measurement of the rotary embedding on a GPU."""
NARROW = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
"""A language model that is none, for what depends on the vision tower alone."""


@dataclass(frozen=True, slots=True)
class RotaryFigure:
    """One way to turn queries and keys of [tokens, heads, head_dim].

    `error`: largest difference from the chain.
    """

    model: str
    tower: Tower
    dtype: str
    how: Literal["saccade", "chain", "copy"]
    tokens: int
    heads: int
    head_dim: int
    nbytes: int
    ms: list[float]
    error: float | None = None

    @property
    def gb_per_s(self) -> float:
        """Queries and keys, read once and written once."""
        return 2 * self.nbytes / statistics.median(self.ms) / 1e6


@dataclass(frozen=True, slots=True)
class PositionFigure:
    """One way to compute all positions of an image in a prompt."""

    model: str
    resolution: str
    how: Way
    ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """All figures of one run. `notes`: missing measurements, and the reasons."""

    rotary: list[RotaryFigure]
    positions: list[PositionFigure]
    notes: list[str]


def bench_kernels(options: KernelBenchOptions) -> KernelFigures:
    """Measure, print tables, and write the JSON."""
    device = pick_device(options.device, options.threads)
    sizes = {resolution: parse_size(resolution) for resolution in options.resolutions}
    for model in options.models:
        if model not in PRESETS:
            raise ConfigError(f"--models {model}: known are {', '.join(PRESETS)}")
    make_room(options, "output_file")
    figures = KernelFigures([], [], [])
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            folder = make_checkpoint(model, Path(name))
            for dtype in options.dtypes:
                figures.rotary.extend(
                    measure_rotary(model, load_spec(folder), dtype, device, options)
                )
            narrow(folder)
            measure_positions(model, folder, sizes, device, options, figures)
    console = Console()
    console.print(rotary_table(figures.rotary, device))
    console.print(position_table(figures.positions, device))
    for note in figures.notes:
        console.print(note, markup=False)
    if options.output_file:
        options.output_file.write_text(json.dumps(as_json(figures, device), indent=1) + "\n")
    return figures


# ---- rotary embedding


def measure_rotary(
    model: str, spec: FamilySpec, dtype: Dtype, device: torch.device, options: KernelBenchOptions
) -> list[RotaryFigure]:
    """Measure the tower's shapes: all heads of queries and keys, within one larger tensor with the
    values.
    """
    tokens = options.tokens or (65536 if device.type == "cuda" else 4096)
    preset = PRESETS[model]
    text, vision = preset.text, preset.vision
    width = vision["embed_dim"] if "embed_dim" in vision else vision["hidden_size"]
    kv_heads, head_dim = spec.kv_spec().layers[0][0].shape
    figures = []
    shapes: list[tuple[Tower, int, int, int]] = [
        ("vision", vision["num_heads"], vision["num_heads"], width // vision["num_heads"]),
        ("text", text["num_attention_heads"], kv_heads, head_dim),
    ]
    for tower, q_heads, k_heads, dim in shapes:
        fused = torch.randn(tokens, q_heads + 2 * k_heads, dim, device=device).to(DTYPES[dtype])
        heads = q_heads + k_heads
        both = fused[:, :heads]
        rotation, chained = rotations(tower, tokens, dim, device)
        packed = both.contiguous()
        target = torch.empty_like(packed)
        error = difference(rotation, chained, both[:512].clone())
        ways: dict[Literal["saccade", "chain", "copy"], Work] = {
            "saccade": partial(pick_ops(both.device, both.dtype).rotate_, rotation, both),
            "chain": partial(turn_in_chain, *chained, both[:, :q_heads], both[:, q_heads:]),
            "copy": partial(target.copy_, packed),
        }
        times = take_turns(
            list(ways.values()), options.repeats, device, CUDA_CALLS if device.type == "cuda" else 1
        )
        for how, ms in zip(ways, times):
            mine = error if how == "saccade" else None
            figures.append(
                RotaryFigure(model, tower, dtype, how, tokens, heads, dim, packed.nbytes, ms, mine)
            )
    return figures


def rotations(
    tower: Tower, tokens: int, dim: int, device: torch.device
) -> tuple[Rotation, tuple[torch.Tensor, torch.Tensor]]:
    """Our rotation, as the tower gives it to the kernel, and (cos, sin) [tokens, dim] of the same
    angles for the chain.
    """
    frequencies = 1e4 ** -(torch.arange(0, dim, 2, device=device) / dim)
    if tower == "text":
        angles = torch.arange(tokens, device=device)[:, None] * frequencies
        return Rotation(*rotary_tables(angles)), (
            angles.cos().repeat(1, 2),
            angles.sin().repeat(1, 2),
        )
    side = 1 + int(tokens**0.5)
    table = torch.arange(side, device=device)[:, None] * frequencies
    number = torch.arange(tokens, device=device)
    places = torch.stack((number // side, number % side))
    axis = section_axes((dim // 4, dim // 2 - dim // 4), interleaved=False).to(device)
    rotation = Rotation(*rotary_tables(table), places, axis)
    if device.type == "cpu":
        rotation = rotation.ready()  # as the tower does, once for all its layers
    angles = places.t().index_select(1, axis) * frequencies
    return rotation, (angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))


def turn_in_chain(
    cos: torch.Tensor, sin: torch.Tensor, *parts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The rotation of transformers' towers: in float32, one operation after another, into new
    tensors.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        low, high = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)

    return tuple(map(turned, parts))


def difference(
    rotation: Rotation, chained: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor
) -> float:
    """Largest difference between the two ways on heads `x` of the first tokens."""
    rows = len(x)
    if rotation.index is None:
        first = Rotation(rotation.cos[:rows], rotation.sin[:rows], pairs=rotation.pairs)
    else:
        first = Rotation(
            rotation.cos,
            rotation.sin,
            rotation.index[:, :rows].contiguous(),
            rotation.axis,
            rotation.pairs,
        )
    (wanted,) = turn_in_chain(chained[0][:rows], chained[1][:rows], x)
    pick_ops(x.device, x.dtype).rotate_(first, x)
    return float((x - wanted).abs().max())


# ---- positions


def measure_positions(
    model: str,
    folder: Path,
    sizes: dict[str, tuple[int, int]],
    device: torch.device,
    options: KernelBenchOptions,
    figures: KernelFigures,
) -> None:
    """Adds to `figures`.

    `sizes`: (width, height). Only the tower's configuration counts: the network in `folder` has
    next to no layers.
    """
    spec = load_spec(folder)
    weights = DummyWeights(torch.float32, device)
    vision = family_model(spec).build(weights, WHOLE, WHOLE).vision
    theirs = None
    if not options.without_transformers and find_spec("transformers"):
        from saccade_bench.lab.peer import TransformersPositions

        try:
            theirs = TransformersPositions(folder, weights)
        except ConfigError as error:
            figures.notes.append(str(error))
    for resolution, (width, height) in sizes.items():
        recipe = spec.recipe(height, width, spec.pixel_bounds)
        facts = spec.num_tokens(recipe.grid), spec.num_patches(recipe.grid), recipe.canvas
        image = Image(ImageKey(bytes(32), bytes(16)), recipe.grid, *facts)
        seen = PositionCache(spec, vision, Metrics())
        ways: dict[Way, Work] = {
            "new grid": lambda image=image: have_positions(
                PositionCache(spec, vision, Metrics()), image
            ),  # type: ignore[misc]
            "seen grid": partial(have_positions, seen, image),
        }
        if theirs is not None:
            ways["transformers"] = partial(have_their_positions, theirs, image)
            if not torch.equal(
                torch.from_numpy(have_positions(seen, image)[0]),
                have_their_positions(theirs, image),
            ):
                figures.notes.append(
                    f"{model}, {resolution}: transformers has other positions than Saccade"
                )
        times = take_turns(list(ways.values()), options.repeats, device)
        figures.positions.extend(
            PositionFigure(model, resolution, how, ms) for how, ms in zip(ways, times)
        )


def narrow(folder: Path) -> None:
    """Reduce the configuration to one layer per tower, and a narrow language model."""
    path = folder / "config.json"
    hidden = 2 * load_spec(folder).kv_spec().layers[0][0].shape[-1]
    config = json.loads(path.read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= NARROW | {"hidden_size": hidden}
    vision |= {"depth": 1} | {
        name: [0]
        for name in ("deepstack_visual_indexes", "fullatt_block_indexes")
        if name in vision
    }
    vision["hidden_size" if "embed_dim" in vision else "out_hidden_size"] = hidden
    path.write_text(json.dumps(config))


def have_positions(known: PositionCache, image: Image) -> tuple[npt.NDArray[np.int64], int]:
    """The positions that the vision tower and the language model need for a prompt of this image
    between some text.
    """
    known.facts(image.grid)
    spans, length = [Span(TEXT, image.num_tokens, 0)], image.num_tokens + 2 * TEXT
    return known.spec.positions(length, spans, [known.image(image.grid)])


def have_their_positions(theirs: TransformersPositions, image: Image) -> torch.Tensor:
    theirs.encoder(image.grid)
    return theirs.prompt(image.grid, TEXT, image.num_tokens, image.num_tokens + 2 * TEXT)


# ---- both


def take_turns(
    works: Sequence[Work], repeats: int, device: torch.device, calls: int = 1
) -> list[list[float]]:
    """Milliseconds of each run of each work, after a warm-up; a run is the mean of `calls`."""

    def run(work: Work) -> None:
        for _ in range(calls):
            work()

    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for ms, work in zip(times, works):
            ms.append(run_ms(partial(run, work), device) / calls)
    return times


def speedup(figure: PositionFigure, figures: Sequence[PositionFigure]) -> float | None:
    """Speed relative to transformers' computation; None if not measured."""
    for other in figures:
        if (other.model, other.resolution, other.how) == (
            figure.model,
            figure.resolution,
            "transformers",
        ) and other is not figure:
            return other.median_ms / figure.median_ms
    return None


def rotary_table(figures: Sequence[RotaryFigure], device: torch.device) -> Table:
    """For people."""
    table = Table(
        "model",
        "tower",
        "dtype",
        "how",
        title=f"Rotary embedding on {where(device)}",
        title_justify="left",
    )
    for name in ("tokens", "heads", "head size", "ms", "GB/s", "of copy", "max difference"):
        table.add_column(name, justify="right")
    for figure in figures:
        same = (figure.model, figure.tower, figure.dtype)
        bound = next(
            each
            for each in figures
            if (each.model, each.tower, each.dtype, each.how) == (*same, "copy")
        )
        table.add_row(
            *same,
            figure.how,
            str(figure.tokens),
            str(figure.heads),
            str(figure.head_dim),
            f"{statistics.median(figure.ms):.3f}",
            f"{figure.gb_per_s:.1f}",
            f"{100 * figure.gb_per_s / bound.gb_per_s:.0f} %",
            "" if figure.error is None else f"{figure.error:.1e}",
        )
    return table


def position_table(figures: Sequence[PositionFigure], device: torch.device) -> Table:
    """For people."""
    table = Table(
        "model",
        "picture",
        "how",
        title=f"Positions of a picture on {where(device)}",
        title_justify="left",
    )
    for name in ("ms", "times less than transformers"):
        table.add_column(name, justify="right")
    for figure in figures:
        gain = speedup(figure, figures)
        shown = "" if gain is None else f"{gain:.1f}"
        table.add_row(figure.model, figure.resolution, figure.how, f"{figure.median_ms:.3f}", shown)
    return table


def as_json(figures: KernelFigures, device: torch.device) -> dict[str, Any]:
    """Every run of every figure, and the conditions."""
    return describe(device) | {
        "rotary": [asdict(figure) | {"gb_per_s": figure.gb_per_s} for figure in figures.rotary],
        "positions": [
            asdict(figure)
            | {"median_ms": figure.median_ms, "times_less": speedup(figure, figures.positions)}
            for figure in figures.positions
        ],
        "notes": figures.notes,
    }
