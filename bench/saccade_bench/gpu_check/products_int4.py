"""Stage `products-int4`: products with matrices of 4 bits by our kernels and by PyTorch's own, and
with matrices of 16 bits, for few rows and many.

Times are the device's; matrices take turns, so that each is read from memory. Floors: bytes at the
speed of a copy, or operations at 600 TFLOP/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from saccade.kernels.reference.int4 import MIDDLE, dense, pack_int4
from saccade.kernels.triton.int4 import launch_int4
from saccade_bench.gpu_check.clock import copies_for, device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.products import ROWS, SHAPES

GROUPS = (128, 32)
Product = Callable[[], torch.Tensor]


def ways_of(
    x: torch.Tensor, outputs: int, device: torch.device
) -> dict[str, tuple[list[Product], int]]:
    """Calls that take turns, and bytes of a matrix."""
    inputs = x.shape[1]
    numbers = outputs * inputs // 2
    found: dict[str, tuple[list[Product], int]] = {"16 bits": ([], 4 * numbers)}
    for _ in range(copies_for(numbers, device)):
        made = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device=device)
        scales = torch.rand(outputs, inputs // GROUPS[0], device=device) / inputs**0.5 / MIDDLE
        matrix = pack_int4(made, scales.to(x.dtype), None, GROUPS[0])
        wide = dense(matrix).to(x.dtype)
        found["16 bits"][0].append(partial(F.linear, x, wide))
        for group in GROUPS:
            spread = scales.repeat_interleave(GROUPS[0] // group, 1).to(x.dtype)
            zeros = torch.full_like(spread, MIDDLE, dtype=torch.uint8)
            for points in (None, zeros):
                few = pack_int4(made, spread, points, group)
                name = f"triton, scales of {group}" + (
                    ", zero points" if points is not None else ""
                )
                works = found.setdefault(name, ([], few.nbytes))[0]
                works.append(partial(launch_int4, x, few, None))
        if device.type == "cuda":
            theirs = torch.ops.aten._convert_weight_to_int4pack(
                made[:, ::2] << 4 | made[:, 1::2], 8
            )
            pairs = torch.stack((scales.t(), torch.zeros_like(scales.t())), 2).to(x.dtype)
            call = partial(torch._weight_int4pack_mm, x, theirs, GROUPS[0], pairs.contiguous())
            found.setdefault("PyTorch's int4pack", ([], numbers))[0].append(call)
    return found


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float16

    def measure(
        metric: str, works: list[Product], least: float, nbytes: int, flop: float
    ) -> Figure:
        wanted, found = reference.float(), works[0]().float()
        ms = device_ms(works, device)
        off = float((found - wanted).abs().max() / wanted.std())
        note = f"{nbytes / ms / 1e6:.0f} GB/s, {flop / ms / 1e9:.0f} TFLOP/s, off by {off:.1e}"
        return Figure(metric, ms, "ms", floor=least, note=note)

    for outputs, inputs in ((64, 256),) if args.quick else SHAPES:
        for rows in (1, 20, 70) if args.quick else ROWS:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            ways = ways_of(x, outputs, device)
            reference = ways["16 bits"][0][0]()
            for name, (works, nbytes) in ways.items():
                metric = f"4-bit product, {inputs} to {outputs}, {rows} rows, {name}"
                flop = 2.0 * rows * inputs * outputs
                total = nbytes + rows * (inputs + outputs) * dtype.itemsize
                least = 1e3 * max(total / args.copy, flop / args.products)
                work = partial(measure, metric, works, least, total, flop)
                file.attempt(metric, work, unit="ms", optional=not name.startswith("triton"))
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
