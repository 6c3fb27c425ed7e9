"""Stage `speeds`: how fast this machine copies and multiplies, which every other stage's floors and
targets follow from; and how fast host memory crosses to the device, pinned or not.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch

from saccade.runtime.vision.streams import Pinned
from saccade_bench.gpu_check.clock import device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.targets import COPY, PRODUCTS

COPIED_BYTES = 1 << 30
SIDE = 8192
CROSSING_BYTES = {
    "an image of 1440p": 11 << 20,
    "an embedding of it": 115 << 20,
    "KV of 8k tokens on a 2B model": 896 << 20,
}
PIECE_BYTES = 1 << 30
"""Of host memory that is registered in one call."""
REPEATS = 7


def copy_speed(device: torch.device, nbytes: int) -> Figure:
    """Read and written together."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = device_ms([lambda: target.copy_(source)], device)
    return Figure(COPY, 2 * nbytes / ms / 1e6, "GB/s", more=True, note=f"of {nbytes >> 20} MiB")


def product_speed(device: torch.device, side: int) -> Figure:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    ms = device_ms([partial(torch.mm, a, b)], device)
    note = f"of {side} x {side}, {dtype}".replace("torch.", "")
    return Figure(PRODUCTS, 2.0 * side**3 / ms / 1e9, "TFLOP/s", more=True, note=note)


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
    """Of memory that was never touched, as a host tier's is at start-up."""
    memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
    began = time.perf_counter()
    keep = Pinned(memory, device)
    seconds = time.perf_counter() - began
    del keep
    return Figure("registering host memory", seconds / nbytes * (1 << 30), "s/GiB")


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)
    nbytes, side = (1 << 22, 128) if args.quick else (COPIED_BYTES, SIDE)
    file.attempt(COPY, partial(copy_speed, device, nbytes), unit="GB/s")
    file.attempt(PRODUCTS, partial(product_speed, device, side), unit="TFLOP/s")
    if args.device == "cuda":
        for name, size in CROSSING_BYTES.items():
            for pinned, up in ((True, True), (False, True), (True, False)):
                work = partial(crossing, device, name, size, pinned=pinned, up=up)
                file.attempt(f"{name}, pinned {pinned}, up {up}", work, unit="GB/s")
        file.attempt("registering", partial(registering, device, PIECE_BYTES), unit="s/GiB")
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
