"""Stage `speeds`: this machine's memory bandwidth and matrix product speed, from which all floors
and targets are derived, and the speed of copies from pinned and pageable host memory.

A copy by PyTorch, and a copy and a read by Triton, are timed inside and outside CUDA graphs, as
well as matrix products of three shapes. The fastest is used, because no kernel should beat a floor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn import functional

from saccade.runtime.vision.streams import Pinned
from saccade_bench.gpu_check.clock import device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.targets import COPY, PRODUCTS

COPIED_BYTES = 4 << 30
SHAPES = {
    "8192 x 8192 to 8192": (8192, 8192, 8192),
    "gate and up of 8192 tokens": (8192, 4096, 24_576),
    "down of 8192 tokens": (8192, 12_288, 4096),
}
"""Rows, inputs and outputs: a square, and two products of Qwen3-VL-8B's language model."""
CROSSING_BYTES = {
    "an image of 1440p": 11 << 20,
    "an embedding of it": 115 << 20,
    "KV of 8k tokens on a 2B model": 896 << 20,
}
PIECE_BYTES = 1 << 30
"""Bytes of host memory that are pinned in one call."""
REPEATS = 7
BLOCK, WARPS = 8192, 8
"""Values and warps per program."""


@triton.jit
def _copy(source, target, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def _read(source, sums, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(source + at), 0))


def movers(device: torch.device, nbytes: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the bytes moved and a call for each method of moving them."""
    source = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    grid = (source.numel() // BLOCK,)
    shape = {"block": BLOCK, "num_warps": WARPS}
    return {
        "copy by torch": (2 * nbytes, lambda: target.copy_(source)),
        "copy by triton": (2 * nbytes, lambda: _copy[grid](source, target, **shape)),
        "read by triton": (nbytes, lambda: _read[grid](source, target, **shape)),
    }


def moving(device: torch.device, nbytes: int, work: Callable[[], object], *, graph: bool) -> Figure:
    speed = nbytes / device_ms([work], device, graph=graph) / 1e6
    return Figure("", speed, "GB/s", more=True, note=f"{nbytes >> 20} MiB moved")


def multiplying(device: torch.device, shape: tuple[int, int, int]) -> Figure:
    rows, inputs, outputs = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    ms = device_ms([partial(functional.linear, a, weight)], device)
    note = f"{rows} x {inputs} to {outputs}, {dtype}".replace("torch.", "")
    return Figure("", 2.0 * rows * inputs * outputs / ms / 1e9, "TFLOP/s", more=True, note=note)


def fastest(file: FigureFile, metric: str, ways: Mapping[str, Callable[[], Figure]]) -> None:
    """Add a figure for each method, and the highest as `metric`."""
    found: list[Figure] = []

    def measure(name: str, work: Callable[[], Figure]) -> Figure:
        found.append(replace(work(), metric=name))
        return found[-1]

    for name, work in ways.items():
        file.attempt(name, partial(measure, name, work))
    if found:
        best = max(found, key=lambda each: each.value or 0.0)
        file.add(replace(best, metric=metric, note=f"{best.metric}, {best.note}"))


def crossing(device: torch.device, name: str, nbytes: int, *, pinned: bool, up: bool) -> Figure:
    host = torch.empty(nbytes, dtype=torch.uint8)
    keep = Pinned(host.numpy(), device) if pinned else None
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    source, target = (host, there) if up else (there, host)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=pinned)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    del keep
    way = f"{'to' if up else 'from'} the device, {'pinned' if pinned else 'pageable'}"
    seconds = statistics.median(times)
    note = f"{1e3 * seconds:.2f} ms"
    return Figure(f"{name} {way}", nbytes / seconds / 1e9, "GB/s", more=True, note=note)


def registering(device: torch.device, nbytes: int) -> Figure:
    """Measure pinning of untouched memory, as for a host cache tier at startup."""
    memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
    began = time.perf_counter()
    keep = Pinned(memory, device)
    seconds = time.perf_counter() - began
    del keep
    return Figure("registering host memory", seconds / nbytes * (1 << 30), "s/GiB")


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)
    quick = {"small": (64, 64, 64)}
    moves = movers(device, 1 << 20 if args.quick else COPIED_BYTES)
    graphs = {", in a graph": True, "": False} if args.device == "cuda" else {"": False}
    copies = {
        f"{name}{where}": partial(moving, device, nbytes, work, graph=graph)
        for name, (nbytes, work) in moves.items()
        for where, graph in graphs.items()
    }
    fastest(file, COPY, copies)
    shapes = quick if args.quick else SHAPES
    products = {
        f"product, {name}": partial(multiplying, device, each) for name, each in shapes.items()
    }
    fastest(file, PRODUCTS, products)
    if args.device == "cuda":
        for name, size in CROSSING_BYTES.items():
            for pinned, up in ((True, True), (False, True), (True, False)):
                work = partial(crossing, device, name, size, pinned=pinned, up=up)
                file.attempt(f"{name}, pinned {pinned}, up {up}", work, unit="GB/s")
        file.attempt("registering", partial(registering, device, PIECE_BYTES), unit="s/GiB")
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
