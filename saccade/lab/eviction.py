"""`saccade bench eviction`: which pictures' embeddings had best go, on drawn traces of pictures shown again and again.

The real `EmbeddingCache` with one tier, asked picture after picture as the scheduler asks it; policies of `lab/policies.py`. Two rates:
of pictures found, and of milliseconds of encoding saved by the published figures for an H200 (`lab/costs.py`). Counts only: they
are the same on every machine. Owns the traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from saccade.core.config import EmbeddingBudgets
from saccade.core.types import Image, ImageKey
from saccade.lab.costs import H200
from saccade.lab.options import EvictionOptions, Policy
from saccade.lab.policies import POLICIES
from saccade.lab.trace import show
from saccade.tools.bench.pictures import parse_resolution

WARM = 5
"""One access in so many, at the start, only fills the cache."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one policy: pictures found, and ms of encoding saved, each as a share of all that were asked for."""

    policy: Policy
    zipf: float
    budget: int
    found: float
    saved: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which picture is shown, access by access."""

    images: tuple[Image, ...]
    costs: npt.NDArray[np.float64]
    shown: npt.NDArray[np.int64]


def bench_eviction(options: EvictionOptions) -> tuple[Rates, ...]:
    """All policies on all traces; prints a table each for pictures and for milliseconds."""
    todo = [(zipf, budget) for zipf in options.zipf for budget in options.budgets]
    traffic = {zipf: draw(options, zipf) for zipf in options.zipf}
    console = Console(highlight=False)
    rates: list[Rates] = []
    for zipf, budget in track(todo, "showing pictures", console=Console(stderr=True), transient=True):
        rates += compare(traffic[zipf], zipf, budget)
    console.print(_table(rates, "Pictures found", "found"))
    console.print(_table(rates, "Encoding saved, by milliseconds on an H200 (published)", "saved"))
    if options.output_file:
        data = {"options": asdict(options) | {"output_file": None}, "rates": [asdict(line) for line in rates]}
        options.output_file.write_text(json.dumps(data, indent=2) + "\n")
    return tuple(rates)


def draw(options: EvictionOptions, zipf: float) -> Traffic:
    """Every tenant has pictures of its own, of sizes that have nothing to do with how popular they are."""
    dice = np.random.Generator(np.random.PCG64(options.seed))
    total = options.pictures * options.tenants
    sizes = parse_resolution(options.image_resolution)
    widths = dice.integers(sizes.low[0], sizes.high[0] + 1, total)
    heights = dice.integers(sizes.low[1], sizes.high[1] + 1, total)
    machine = H200.machine
    images = tuple(
        show(ImageKey(number.to_bytes(32, "big"), bytes(16)), int(height), int(width), machine).image
        for number, (width, height) in enumerate(zip(widths, heights, strict=True))
    )
    costs = np.array([H200.costs.encode_ms([image.num_patches]) for image in images])
    weights = np.arange(1, options.pictures + 1, dtype=np.float64) ** -zipf
    upto = np.cumsum(weights) / weights.sum()
    ranks = np.minimum(np.searchsorted(upto, dice.random(options.accesses)), options.pictures - 1)
    if options.drift:
        ranks = (ranks + np.arange(options.accesses) // options.drift) % options.pictures
    tenants = dice.integers(options.tenants, size=options.accesses)
    return Traffic(images, costs, tenants * options.pictures + ranks)


def compare(traffic: Traffic, zipf: float, budget: int) -> Iterator[Rates]:
    """Every policy, with room for `budget` percent of all embeddings."""
    per_token = H200.machine.embedding_bytes
    room = sum(image.num_tokens for image in traffic.images) * per_token * budget // 100
    begin = len(traffic.shown) // WARM
    asked = traffic.costs[traffic.shown[begin:]]
    for policy, make in POLICIES.items():
        cache = make(EmbeddingBudgets(room), per_token)
        found = np.empty(len(traffic.shown), dtype=bool)
        for place, number in enumerate(traffic.shown.tolist()):
            image = traffic.images[number]
            found[place] = cache.locate(image.key) is not None
            if not found[place]:
                cache.admit(image.key, image.num_tokens)
            cache.pin(image.key)
            cache.unpin(image.key)
        counted = found[begin:]
        yield Rates(policy, zipf, budget, float(counted.mean()), float(asked[counted].sum() / asked.sum()))


def _table(rates: list[Rates], title: str, what: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("Zipf", "room", *POLICIES):
        table.add_column(name, justify="right")
    for zipf, budget in dict.fromkeys((line.zipf, line.budget) for line in rates):
        shares = {
            line.policy: line.found if what == "found" else line.saved for line in rates if (line.zipf, line.budget) == (zipf, budget)
        }
        best = max(shares.values())
        cells = [f"[bold]{share:.1%}[/bold]" if share == best else f"{share:.1%}" for share in shares.values()]
        table.add_row(f"{zipf:g}", f"{budget} %", *cells)
    return table
