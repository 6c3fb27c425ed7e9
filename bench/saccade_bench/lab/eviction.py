"""`saccade bench eviction`: policies of eviction for embeddings, on drawn traces of repeated
images.

The real `EmbeddingCache` with one tier, asked image after image as the scheduler asks; policies of
`policies.py`. Two rates: of images found, and of milliseconds of encoding saved by the published
figures for an H200 (`costs.py`). Counts only: the same on every machine. Owns the traces.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.config import EmbeddingBudgets
from saccade.core.types import Image, ImageKey
from saccade_bench.counted import each
from saccade_bench.lab.costs import H200
from saccade_bench.lab.options import EvictionOptions, Policy
from saccade_bench.lab.policies import POLICIES
from saccade_bench.lab.results import make_room
from saccade_bench.lab.trace import show
from saccade_bench.load.images import parse_resolution

WARM = 5
"""One access in so many, at the start, only fills the cache."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one policy: pictures found, and ms of encoding saved, each as a share of all that were
    asked for.
    """

    policy: Policy
    drift: int
    zipf: float
    budget: int
    found: float
    saved: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """The shown image, access by access."""

    images: tuple[Image, ...]
    costs: npt.NDArray[np.float64]
    shown: npt.NDArray[np.int64]


def bench_eviction(options: EvictionOptions) -> tuple[Rates, ...]:
    """All policies on all traces; prints a table each for pictures and for milliseconds."""
    make_room(options, "output_file")
    traffic = {
        (drift, zipf): draw(options, drift, zipf)
        for drift in options.drift
        for zipf in options.zipf
    }
    todo = [(*which, budget) for which in traffic for budget in options.budgets]
    console = Console(highlight=False)
    rates: list[Rates] = []
    for drift, zipf, budget in each(todo, "showing pictures"):
        for policy in POLICIES:
            found, saved = show_all(traffic[drift, zipf], policy, budget)
            rates.append(Rates(policy, drift, zipf, budget, found, saved))
    for drift in options.drift:
        said = f"one picture falls every {drift} accesses" if drift else "popularity stays"
        lines = [line for line in rates if line.drift == drift]
        console.print(
            _table(f"Pictures found; {said}", lines, {id(line): line.found for line in lines})
        )
        console.print(
            _table(
                f"Milliseconds of encoding saved (H200); {said}",
                lines,
                {id(line): line.saved for line in lines},
            )
        )
    if options.output_file:
        data = {
            "options": asdict(options) | {"output_file": None},
            "rates": [asdict(line) for line in rates],
        }
        options.output_file.write_text(json.dumps(data, indent=2) + "\n")
    return tuple(rates)


def draw(options: EvictionOptions, drift: int, zipf: float) -> Traffic:
    """Draw traffic: every tenant has images of its own, of sizes independent of popularity."""
    dice = np.random.Generator(np.random.PCG64(options.seed))
    total = options.pictures * options.tenants
    sizes = parse_resolution(options.image_resolution)
    widths = dice.integers(sizes.low[0], sizes.high[0] + 1, total)
    heights = dice.integers(sizes.low[1], sizes.high[1] + 1, total)
    machine = H200.machine
    images = tuple(
        show(
            ImageKey(number.to_bytes(32, "big"), bytes(16)), int(height), int(width), machine
        ).image
        for number, (width, height) in enumerate(zip(widths, heights, strict=True))
    )
    costs = np.array([H200.costs.encode_ms([image.num_patches]) for image in images])
    weights = np.arange(1, options.pictures + 1, dtype=np.float64) ** -zipf
    upto = np.cumsum(weights) / weights.sum()
    ranks = np.minimum(np.searchsorted(upto, dice.random(options.accesses)), options.pictures - 1)
    if drift:
        ranks = (ranks + np.arange(options.accesses) // drift) % options.pictures
    tenants = dice.integers(options.tenants, size=options.accesses)
    return Traffic(images, costs, tenants * options.pictures + ranks)


def show_all(traffic: Traffic, policy: Policy, budget: int) -> tuple[float, float]:
    """Shares of pictures found, and of milliseconds saved, with room for `budget` percent of all
    embeddings.
    """
    per_token = H200.machine.embedding_bytes
    room = sum(image.num_tokens for image in traffic.images) * per_token * budget // 100
    cache = EmbeddingCache(EmbeddingBudgets(room), per_token, worth=POLICIES[policy])
    found = np.empty(len(traffic.shown), dtype=bool)
    for place, number in enumerate(traffic.shown.tolist()):
        image = traffic.images[number]
        found[place] = cache.locate(image.key) is not None
        if not found[place]:
            cache.admit(image.key, image.num_tokens)
        cache.pin(image.key)
        cache.unpin(image.key)
    begin = len(found) // WARM
    asked, counted = traffic.costs[traffic.shown[begin:]], found[begin:]
    return float(counted.mean()), float(asked[counted].sum() / asked.sum())


def _table(title: str, rates: list[Rates], shares: dict[int, float]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("Zipf", "room", *POLICIES):
        table.add_column(name, justify="right")
    for zipf, budget in dict.fromkeys((line.zipf, line.budget) for line in rates):
        row = [shares[id(line)] for line in rates if (line.zipf, line.budget) == (zipf, budget)]
        cells = [
            f"[bold]{share:.1%}[/bold]" if share == max(row) else f"{share:.1%}" for share in row
        ]
        table.add_row(f"{zipf:g}", f"{budget} %", *cells)
    return table
