"""Measure the cost of a changed screenshot in vision encoders that encode tiles independently.

    python -m saccade_bench.screens [--formats PNG JPEG]
    python -m saccade_bench.screens --base-url http://127.0.0.1:8000 [--events caret] [--turns 5]

Without a server, it draws a desktop and eight events, preprocesses each screenshot as each model
family does, hashes the tiles, and prints the percentage of patches in new tiles for each event.
With a server, it sends the screenshots, and prints the tiles and the TTFT of each event, compared
with a screenshot without any cached tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean

import numpy as np
from rich.console import Console
from rich.table import Table

from saccade.core.types import Image, ImageKey
from saccade.media.formats.decode import decode_into
from saccade.media.tiles import name_tiles
from saccade_bench.screens.desktop import EVENTS, HEIGHT, QUIET, WIDTH, Format, screenshot
from saccade_bench.screens.layouts import FAMILIES, TiledLayout
from saccade_bench.screens.served import ServedScreens


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=["PNG", "JPEG"], default=["PNG", "JPEG"])
    parser.add_argument("--base-url", default="")
    parser.add_argument("--events", nargs="+", choices=list(EVENTS), default=list(EVENTS))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args(words)
    for format in given.formats:
        if given.base_url:
            show_served(ServedScreens(given.base_url, format), given.events, given.turns)
        else:
            show_rows(format)
    return 0


def tile_names(layout: TiledLayout, data: bytes) -> list[tuple[bytes, int]]:
    """Return the hash and the number of patches of each tile of a screenshot."""
    recipe = layout.recipe(HEIGHT, WIDTH, layout.pixel_bounds)
    canvas = np.empty((*recipe.canvas, 3), np.uint8)
    decode_into([(canvas, recipe)], memoryview(data), (HEIGHT, WIDTH), 1)
    key = ImageKey(bytes(32), bytes(16))
    sizes = layout.num_tokens(recipe.grid), layout.num_patches(recipe.grid)
    image, tiles = Image(key, recipe.grid, *sizes, recipe.canvas), layout.tiles(recipe.grid)
    names = name_tiles(canvas.data.cast("B"), image, tiles).tiles
    return [(name, layout.num_patches(tile.grid)) for name, tile in zip(names, tiles)]


def new_rows(layout: TiledLayout, before: bytes, after: bytes) -> tuple[int, int]:
    """Return the number of patches in new tiles of the second screenshot, and in all its tiles."""
    seen = {name for name, _ in tile_names(layout, before)}
    shown = tile_names(layout, after)
    fresh = {name: rows for name, rows in shown if name not in seen}
    return sum(fresh.values()), sum(rows for _, rows in shown)


def show_rows(format: Format) -> None:
    """Print the percentage of new patches by family and event."""
    table = Table("family", *EVENTS, "mean seen %", "reported %", title=f"new rows %, {format}")
    quiet = screenshot(QUIET, format)
    shots = [screenshot(event, format) for event in EVENTS.values()]
    for name, family in FAMILIES.items():
        found = [new_rows(family.layout, quiet, shot) for shot in shots]
        new = [100 * fresh / every for fresh, every in found]
        seen = f"{100 - mean(new):.0f}"
        table.add_row(name, *(f"{each:.0f}" for each in new), seen, str(family.reported))
    Console(width=160).print(table)


def show_served(screens: ServedScreens, events: Sequence[str], turns: int) -> None:
    """Print the tiles and the minimum TTFT of each event, with and without cached tiles."""
    table = Table("event", "tiles new", "seen", "TTFT ms", "cold ms", "ratio")
    for name in events:
        pairs = [screens.turn(EVENTS[name], f"{name} {turn}") for turn in range(turns)]
        warm, cold = min(pair.warm for pair in pairs), min(pair.cold for pair in pairs)
        new, seen = pairs[-1].new, pairs[-1].seen
        figures = f"{warm:.0f}", f"{cold:.0f}", f"{warm / cold:.2f}"
        table.add_row(name, str(new), str(seen), *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
