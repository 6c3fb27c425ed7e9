"""Stage `passes`: what only moves bytes (norms, gate, rotary, writing the cache) beside a copy, and
the sampler beside one reading of its logits.

Speeds count bytes read and written once, in GB/s; floors are a copy's (stage `speeds`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.paged import plain_cache
from saccade.kernels.reference.rotary import rotary_tables
from saccade.kernels.triton.layer import launch_add_norm, launch_gate, launch_turn_and_cache
from saccade.kernels.triton.rotary import launch as launch_rotary
from saccade.kernels.triton.sample import launch_sample
from saccade_bench.gpu_check.clock import copies_for, device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 12288, 32, 8, 128
"""Qwen3-VL-8B's language model."""
TOWER_HIDDEN, TOWER_HEADS, TOWER_DIM = 1152, 16, 72
VOCAB = 151_936
Pass = tuple[str, int, Callable[[], object]]
"""Name, bytes read and written, a call."""


class Maker:
    """Tensors where and as the passes want them."""

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device = device
        self.dtype = torch.bfloat16
        self.quick = quick

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def passes(self, rows: int) -> Iterator[Pass]:
        """Each on tensors of its own."""
        each = self.dtype.itemsize
        hidden, inner = (64, 128) if self.quick else (HIDDEN, INNER)
        x, delta, weight = self.noise(rows, hidden), self.noise(rows, hidden), self.noise(hidden)
        norm = partial(launch_add_norm, x, delta, weight, None, 1e-6)
        yield f"add and RMS norm, {rows} rows", 4 * x.nbytes, norm
        y, change = self.noise(rows, TOWER_HIDDEN), self.noise(rows, TOWER_HIDDEN)
        ones, zeros = self.noise(TOWER_HIDDEN), self.noise(TOWER_HIDDEN)
        centred = partial(launch_add_norm, y, change, ones, zeros, 1e-6)
        yield f"add and layer norm, {rows} rows", 4 * y.nbytes, centred
        both = self.noise(rows, 2 * inner)
        gated = partial(launch_gate, both, "silu")
        yield f"SiLU gate, {rows} rows", 3 * rows * inner * each, gated
        yield f"turn and cache, {rows} rows", *self._turn(rows)
        yield f"rotary of the tower, {rows} rows", *self._rotary(rows)

    def _turn(self, rows: int) -> tuple[int, Callable[[], object]]:
        heads, kv_heads = (4, 2) if self.quick else (HEADS, KV_HEADS)
        qkv = self.noise(rows, heads + 2 * kv_heads, DIM)
        slots = torch.randperm(2 * rows, device=self.device)[:rows]
        kept = [self.noise(2 * rows, kv_heads, DIM) for _ in range(2)]
        cos, sin = rotary_tables(torch.randn(rows, DIM // 2, device=self.device))
        norm = QKNorm(self.noise(heads + kv_heads, DIM), 1e-6)
        cache = plain_cache(kept[0], kept[1])
        return 2 * qkv.nbytes, partial(
            launch_turn_and_cache, qkv, kv_heads, cos, sin, norm, cache, slots, halves=True
        )

    def _rotary(self, rows: int) -> tuple[int, Callable[[], object]]:
        qkv = self.noise(rows, 3 * TOWER_HEADS, TOWER_DIM)
        turned = qkv[:, : 2 * TOWER_HEADS]
        places = torch.randint(0, 100, (2, rows), device=self.device)
        axis = (torch.arange(TOWER_DIM // 2, device=self.device) >= TOWER_DIM // 4).long()
        tables = rotary_tables(torch.randn(128, TOWER_DIM // 2, device=self.device))
        call = partial(launch_rotary, turned, *tables, places, axis, halves=True)
        return 2 * rows * 2 * TOWER_HEADS * TOWER_DIM * self.dtype.itemsize, call

    def draws(self, rows: int) -> Iterator[Pass]:
        """The sampler's ways, of logits as a model has them: few stand out."""
        vocab = 300 if self.quick else VOCAB
        logits = 2 * torch.randn(rows, vocab, device=self.device)
        ways = {
            "greedy": (0.0, 1.0, 0.0, 0),
            "temperature 1": (1.0, 1.0, 0.0, 0),
            "top-p 0.9": (0.7, 0.9, 0.0, 0),
            "top-k 50, top-p 0.9": (0.7, 0.9, 0.0, 50),
            "min-p 0.05": (1.0, 1.0, 0.05, 0),
        }
        slots = torch.arange(rows, device=self.device)
        uniforms = torch.rand(rows, dtype=torch.float64, device=self.device)
        for name, (*numbers, top_k) in ways.items():
            params = torch.tensor([numbers] * rows, device=self.device)
            top_ks = torch.full((rows,), top_k, dtype=torch.int32, device=self.device)
            call = partial(launch_sample, logits, slots, params, top_ks, uniforms)
            yield f"{name}, {rows} rows", logits.nbytes, call
        yield f"torch argmax, {rows} rows", logits.nbytes, partial(torch.argmax, logits, -1)
        yield f"torch sort, {rows} rows", logits.nbytes, partial(torch.sort, logits, -1)


def main() -> int:
    args = stage_arguments(__doc__)
    device, file = torch.device(args.device), FigureFile(args.figures)
    torch.manual_seed(0)
    maker = Maker(device, quick=args.quick)

    def measure(metric: str, nbytes: int, works: list[Callable[[], object]]) -> Figure:
        ms = device_ms(works, device)
        note = f"{1e3 * ms:.1f} us"
        return Figure(
            metric, nbytes / ms / 1e6, "GB/s", more=True, floor=args.copy / 1e9, note=note
        )

    for rows in (8,) if args.quick else (64, 8192, 14_400):
        sets = [list(maker.passes(rows))]
        largest = max(nbytes for _, nbytes, _ in sets[0])
        sets += [list(maker.passes(rows)) for _ in range(copies_for(largest, device) - 1)]
        for each in zip(*sets):
            metric, calls = f"pass, {each[0][0]}", [call for _, _, call in each]
            file.attempt(metric, partial(measure, metric, each[0][1], calls), unit="GB/s")
    for rows in (2,) if args.quick else (1, 64, 256):
        for name, nbytes, call in maker.draws(rows):
            metric = f"sampler, {name}"
            file.attempt(metric, partial(measure, metric, nbytes, [call]), unit="GB/s")
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
