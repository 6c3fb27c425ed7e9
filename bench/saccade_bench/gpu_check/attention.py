"""Stage `attention`: the vision encoder's attention, paged decode and paged prefill, with every
implementation.

Times are device times in milliseconds. Floors are bytes or operations at the machine's measured
speeds (stage `speeds`). Every result is compared with the first implementation's result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from saccade.kernels.language_attention import possible
from saccade.kernels.matrix import FP8
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.fp8 import to_fp8
from saccade.kernels.reference.paged import (
    AttentionBackend,
    PagedCache,
    PagedRows,
    PagedShape,
    plain_cache,
)
from saccade.kernels.reference.segments import Segments
from saccade.plugins.gpu.libraries.installed import find_fa3
from saccade.plugins.gpu.tower_attention import TOWERS
from saccade.plugins.gpu.triton.attention import Tile
from saccade.plugins.gpu.triton.paged import launch_paged
from saccade.plugins.gpu.triton.segments import launch_segments
from saccade_bench.gpu_check.clock import copies_for, device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments

PAGE = 16
HEADS, KV_HEADS, DIM = 32, 8, 128
"""Heads, KV heads and head size of Qwen3-VL-8B."""
TOWER_HEADS, TOWER_DIM = 16, 72
TOWER_TILES = (
    Tile(128, 64, 8, 3, registers=128),
    Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(128, 128, 8, 3),
)
"""The current tile first, then alternatives for Hopper with heads of 72."""
PREFILL_TILES = (
    Tile(128, 64, 8, 3, registers=128),
    Tile(128, 64, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(128, 128, 8, 3),
)
"""The current tile first, then alternatives for heads of 128."""
SMALL_TILES = (Tile(16, 16, 4, 1),)
PIECES = (512, 4096)
"""Minimum keys per KV split."""
OURS = ("triton", "the rule")
"""Prefixes of the names of implementations that must work."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, data type, sizes and the machine's speeds for a benchmark."""

    device: torch.device
    dtype: torch.dtype
    file: FigureFile
    quick: bool
    bytes_per_s: float
    flops: float
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    tower_heads: int = TOWER_HEADS

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def tiles(self, wanted: tuple[Tile, ...]) -> tuple[Tile, ...]:
        return SMALL_TILES if self.quick else wanted


def name_of(tile: Tile) -> str:
    most = "" if tile.registers is None else f", {tile.registers} registers"
    return f"triton {tile.rows}x{tile.keys}, {tile.warps} warps, {tile.stages} stages{most}"


def compare(
    bench: Bench,
    metric: str,
    ways: dict[str, list[Callable[[], torch.Tensor]]],
    floor: float,
    flops: float = 0.0,
) -> None:
    """Add a figure for each implementation, and one for the best.

    An implementation is a list of calls that are made in turn, with different data. `floor` is in
    ms.
    """
    first: list[torch.Tensor] = []
    best: dict[str, float] = {}

    def measure(name: str, works: list[Callable[[], torch.Tensor]]) -> Figure:
        out = works[0]().float()
        first.append(out)
        difference = float((out - first[0]).abs().max())
        best[name] = ms = device_ms(works, bench.device)
        rate = f"{flops / ms / 1e9:.0f} TFLOP/s, " if flops else ""
        note = f"{rate}differs by {difference:.1e}"
        return Figure(f"{metric}, {name}", ms, "ms", floor=floor, note=note)

    for name, works in ways.items():
        work = partial(measure, name, works)
        optional = not name.startswith(OURS)
        bench.file.attempt(f"{metric}, {name}", work, unit="ms", optional=optional)
    if best:
        name = min(best, key=lambda each: best[each])
        figure = Figure(f"{metric}, best", best[name], "ms", floor=floor, note=name)
        bench.file.add(figure)
    ours = [ms for way, ms in best.items() if way.startswith(OURS)]
    if "fa3" in best and ours:
        ratio = min(ours) / best["fa3"]
        bench.file.add(Figure(f"{metric}, fa3 beside ours", ratio, "times", more=True))


# ---- vision encoder


def bench_tower(bench: Bench, sizes: Sequence[int]) -> None:
    for tokens in (48,) if bench.quick else sizes:
        qkv = bench.noise(tokens, 3 * bench.tower_heads, TOWER_DIM)
        q, k, v = qkv.chunk(3, dim=1)
        bounds = torch.tensor([0, tokens], dtype=torch.int32, device=bench.device)
        ways: dict[str, list[Callable[[], torch.Tensor]]] = {}
        if bench.device.type == "cuda":
            ways["torch flash"] = [partial(flash, q, k, v, bounds)]
            if find_fa3():
                whole = Segments(bounds, tokens)
                ways["fa3"] = [partial(TOWERS["fa3"], q, k, v, whole, TOWER_DIM**-0.5)]
        else:
            ways["torch sdpa"] = [partial(dense, q, k, v, causal=False)]
        scale = TOWER_DIM**-0.5
        for tile in bench.tiles(TOWER_TILES):
            ours = partial(launch_segments, q, k, v, bounds, bounds, tokens, scale, tile=tile)
            ways[name_of(tile)] = [ours]
        flops = 4.0 * tokens * tokens * bench.tower_heads * TOWER_DIM
        metric = f"tower attention, {tokens} rows"
        compare(bench, metric, ways, 1e3 * flops / bench.flops, flops)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    n = len(q)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, n, n, 0.0, False, False, scale=TOWER_DIM**-0.5
    )[0]
    return out


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return PyTorch's attention over one sequence. Tensors are [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    return out[0].transpose(0, 1)


# ---- language model


def rows_of(new: Sequence[int], keys: Sequence[int], device: torch.device) -> PagedRows:
    """Return requests with `new` tokens each, which are the last of `keys`, on random pages."""
    pages = [-(-count // PAGE) for count in keys]
    order = 1 + torch.randperm(sum(pages)).int()
    table = torch.zeros(len(keys), max(pages), dtype=torch.int32)
    for row, mine in enumerate(order.split(pages)):
        table[row, : len(mine)] = mine
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(keys, dtype=torch.int32)
    singles = len(new) if max(new) == 1 else 0
    lines = torch.arange(len(keys), device=device)
    return PagedRows(starts.to(device), lengths.to(device), lines, table.to(device), PAGE, singles)


def caches_of(bench: Bench, slots: int, kept: torch.dtype) -> Iterator[PagedCache]:
    """Yield enough copies of a cache to exceed the device's L2 cache."""
    nbytes = 2 * slots * bench.kv_heads * DIM * kept.itemsize
    for _ in range(copies_for(nbytes, bench.device)):
        keys, values = (bench.noise(slots, bench.kv_heads, DIM) for _ in range(2))
        if kept == FP8:
            keys, values = to_fp8(keys), to_fp8(values)
        yield plain_cache(keys, values)


def library(
    bench: Bench,
    name: str,
    q: torch.Tensor,
    caches: Sequence[PagedCache],
    rows: PagedRows,
) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """Return calls of a backend, which is planned on the first call. Empty if it is unsupported."""
    table = pick_ops(bench.device, bench.dtype).attention
    if name not in possible(table, bench.device, bench.dtype):
        return {}
    made: list[AttentionBackend] = []

    def call(cache: PagedCache) -> torch.Tensor:
        if not made:
            shape = PagedShape(bench.kv_heads, DIM, PAGE, cache.keys.dtype, bench.dtype)
            backend = table[name].make(shape)
            backend.plan(rows)
            made.append(backend)
        return made[0](q, cache)

    return {name: [partial(call, cache) for cache in caches]}


def bench_decode(bench: Bench) -> None:
    shapes = [(64, 1024), (1, 25_600), (256, 1024), (1, 1024), (64, 8192)]
    for count, keys in [(2, 40)] if bench.quick else shapes:
        rows = rows_of([1] * count, [keys] * count, bench.device)
        slots = (1 + count * -(-keys // PAGE)) * PAGE
        for kept in (bench.dtype, FP8):
            caches = list(caches_of(bench, slots, kept))
            q = bench.noise(count, bench.heads, DIM)
            ways: dict[str, list[Callable[[], torch.Tensor]]] = {}
            for piece in (None, *((64,) if bench.quick else PIECES)):
                calls: list[Callable[[], torch.Tensor]] = [
                    partial(launch_paged, q, cache, rows, DIM**-0.5, piece=piece)
                    for cache in caches
                ]
                ways["the rule" if piece is None else f"pieces of {piece}"] = calls
            ways |= library(bench, "flashinfer", q, caches, rows)
            nbytes = 2 * count * keys * bench.kv_heads * DIM * kept.itemsize
            form = "8-bit cache" if kept == FP8 else "cache"
            metric = f"paged decode, {count} rows of {keys}, {form}"
            compare(bench, metric, ways, 1e3 * nbytes / bench.bytes_per_s)


def bench_prefill(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Measure shapes of (requests, new tokens of each, keys of each)."""
    for count, new, keys in [(2, 20, 40)] if bench.quick else shapes:
        rows = rows_of([new] * count, [keys] * count, bench.device)
        slots = (1 + count * -(-keys // PAGE)) * PAGE
        kv = [bench.noise(slots, bench.kv_heads, DIM) for _ in range(2)]
        q = bench.noise(count * new, bench.heads, DIM)
        cache = plain_cache(kv[0], kv[1])
        ways: dict[str, list[Callable[[], torch.Tensor]]] = {
            name_of(tile): [partial(launch_paged, q, cache, rows, DIM**-0.5, prefill=tile)]
            for tile in bench.tiles(PREFILL_TILES)
        }
        ways |= library(bench, "fa3", q, [cache], rows)
        if count == 1 and new == keys:
            k, v = (bench.noise(new, bench.kv_heads, DIM) for _ in range(2))
            # It has other keys, so it is last: the others are compared with the first result.
            ways["torch, without pages (other keys)"] = [partial(dense, q, k, v, causal=True)]
        seen = new * (keys - new) + new * (new + 1) / 2
        flops = 4.0 * count * seen * bench.heads * DIM
        metric = f"paged prefill, {count} x {new} over {keys}"
        compare(bench, metric, ways, 1e3 * flops / bench.flops, flops)


def main() -> int:
    args = stage_arguments(__doc__)
    device = torch.device(args.device)
    torch.manual_seed(0)
    # Triton's interpreter computes wrong products in bfloat16.
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float16
    heads = (4, 2, 2) if args.quick else (HEADS, KV_HEADS, TOWER_HEADS)
    file = FigureFile(args.figures)
    bench = Bench(device, dtype, file, args.quick, args.copy, args.products, *heads)
    parts = {  # most important first
        "prefill over a prefix": partial(bench_prefill, bench, [(1, 3650, 25_600)]),
        "the largest image": partial(bench_tower, bench, [14_400]),
        "decode": partial(bench_decode, bench),
        "prefill": partial(bench_prefill, bench, [(1, 8192, 8192), (8, 1024, 1024)]),
        "smaller images": partial(bench_tower, bench, [8192, 3584]),
    }
    for name in [*parts][:3] if args.quick else parts:
        bench.file.attempt(name, parts[name])
    return bool(bench.file.failures)


if __name__ == "__main__":
    sys.exit(main())
