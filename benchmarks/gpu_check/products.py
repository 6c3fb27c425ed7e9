"""Stage `products`: products with matrices in 8 bits by our kernel, by cuBLAS (`scaled_mm`), and
with matrices in 16 bits, for few rows and many.

Times are the device's; matrices take turns, so that each is read from memory. Floors: bytes at the
speed of a copy, or operations at 600 TFLOP/s (twice that where both sides are 8 bits).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.gpu_check.clock import copies_for, copy_speed, device_ms
from benchmarks.gpu_check.figures import Figure, FigureFile, stage_arguments
from benchmarks.gpu_check.targets import PRODUCT_FLOPS
from saccade.kernels.fp8 import LARGEST, Fp8Matrix, to_fp8
from saccade.kernels.fp8_gpu import launch_fp8

SHAPES = ((6144, 2560), (2560, 4096), (19_456, 2560), (2560, 9728))
"""Outputs and inputs of Qwen3-VL-4B's layers: queries, keys and values; their output; gate and up;
down.
"""
ROWS = (1, 8, 16, 64, 256, 1024, 8192)
BLOCK = 128
Product = Callable[[], torch.Tensor]


def ways_of(
    x: torch.Tensor, outputs: int, device: torch.device
) -> dict[str, tuple[list[Product], int]]:
    """Calls that take turns, and bytes of a matrix."""
    inputs = x.shape[1]
    plain, blocks, rows, eight, cut = (list[Product]() for _ in range(5))
    for _ in range(copies_for(outputs * inputs, device)):
        wide = torch.randn(outputs, inputs, device=device) / inputs**0.5
        scale = (wide.abs().amax(1, keepdim=True) / LARGEST).contiguous()
        values = to_fp8(wide, scale)
        spread = scale.expand(outputs, max(1, inputs // BLOCK)).contiguous()
        plain.append(partial(F.linear, x, wide.to(x.dtype)))
        blocks.append(partial(launch_fp8, x, Fp8Matrix(values, spread, min(BLOCK, inputs)), None))
        rows.append(partial(launch_fp8, x, Fp8Matrix(values, scale, inputs), None))
        eight.append(partial(scaled, x, values, scale))
        if device.type == "cuda":
            one = wide.abs().amax() / LARGEST
            all_alike = one.expand(outputs // BLOCK, inputs // BLOCK).contiguous()
            cut.append(partial(scaled_blocks, x, to_fp8(wide, one), all_alike))
    nbytes = outputs * inputs
    by_blocks = {"scaled_mm, blocks, rows quantised first": (cut, nbytes)} if cut else {}
    return {
        "16 bits": (plain, 2 * nbytes),
        "triton, FP8 weights, scales of 128": (blocks, nbytes),
        "triton, FP8 weights, a scale a row": (rows, nbytes),
        "scaled_mm, rows quantised first": (eight, nbytes),
        **by_blocks,
    }


def scaled(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Both sides in 8 bits, a scale for each row of either."""
    mine = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / LARGEST
    quantised = to_fp8(x, mine)
    return torch._scaled_mm(
        quantised, values.t(), scale_a=mine, scale_b=scale.t(), out_dtype=x.dtype
    )


def scaled_blocks(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Both sides in 8 bits, scales of 128 inputs of a row and of 128 x 128 weights. As torch 2.11
    describes `scaled_mm`; NOT YET RUN, and one of the shapes of scales may be refused.
    """
    groups = x.float().unflatten(1, (-1, BLOCK))
    mine = groups.abs().amax(2).clamp_(min=1e-12) / LARGEST
    quantised = to_fp8(groups, mine[..., None]).flatten(1)
    kinds = F.ScalingType
    out: torch.Tensor = F.scaled_mm(
        quantised,
        values.t(),
        mine.t().contiguous().t(),
        kinds.BlockWise1x128,
        scales,
        kinds.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return out


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)
    torch.manual_seed(0)
    speed = copy_speed(device)
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
        for rows in (1, 20) if args.quick else ROWS:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            reference = x
            for name, (works, nbytes) in ways_of(x, outputs, device).items():
                metric = f"product, {inputs} to {outputs}, {rows} rows, {name}"
                flop = 2.0 * rows * inputs * outputs
                peak = PRODUCT_FLOPS * (2 if name.startswith("scaled_mm") else 1)
                total = nbytes + rows * (inputs + outputs) * dtype.itemsize
                least = 1e3 * max(total / speed, flop / peak)
                reference = works[0]() if name == "16 bits" else reference
                work = partial(measure, metric, works, least, total, flop)
                optional = not name.startswith("triton")
                file.attempt(metric, work, unit="ms", optional=optional)
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
