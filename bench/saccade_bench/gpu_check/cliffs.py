"""Stage `cliffs`: attention over pages where averages hide the worst: one long row among short
ones, a short prompt over a long cached prefix, heads of 256.

Each is held against its bytes or operations at the machine's own speeds, and beside balanced work
of as many keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from saccade.kernels.reference.paged import plain_cache
from saccade.kernels.triton.paged import launch_paged
from saccade_bench.gpu_check.attention import DIM, HEADS, KV_HEADS, PAGE, rows_of
from saccade_bench.gpu_check.clock import copies_for, device_ms
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments

MIXES = ((63, 1024, 25_600), (63, 1024, 100_000), (7, 1024, 100_000))
"""Short rows, their keys, and those of one long row."""
PREFIXES = ((50, 29_000), (50, 100_000), (512, 29_000))
"""Tokens of a prompt, and keys that they see in all."""
WIDE = (16, 4, 256)
"""Heads of queries and of keys, and values of each: Qwen3.5's."""


class Cliffs:
    """Where, in what, and how far."""

    def __init__(self, args: object, file: FigureFile) -> None:
        self._file = file
        self._quick: bool = args.quick  # type: ignore[attr-defined]
        self._copy: float = args.copy  # type: ignore[attr-defined]
        self._products: float = args.products  # type: ignore[attr-defined]
        self._device = torch.device(args.device)  # type: ignore[attr-defined]
        # bfloat16 products are wrong in Triton's interpreter.
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float16

    def run(self) -> None:
        heads = (4, 2, 64) if self._quick else (HEADS, KV_HEADS, DIM)
        wide = (4, 2, 256) if self._quick else WIDE
        for few, keys, long in ((3, 20, 90),) if self._quick else MIXES:
            self._decode(f"{few} rows of {keys} and one of {long}", [keys] * few + [long], heads)
            even = -(-(few * keys + long) // (few + 1))
            self._decode(f"{few + 1} rows of {even}", [even] * (few + 1), heads)
        for new, keys in ((5, 90),) if self._quick else PREFIXES:
            self._prefill(f"{new} tokens over {keys}", new, keys, heads)
        self._decode(
            "heads of 256, 64 rows of 1024", [40] * 2 if self._quick else [1024] * 64, wide
        )
        new = 20 if self._quick else 8192
        self._prefill("heads of 256, a chunk", new, new, wide)

    def _decode(self, name: str, keys: Sequence[int], heads: tuple[int, int, int]) -> None:
        _, kv_heads, dim = heads
        nbytes = 2 * sum(keys) * kv_heads * dim * self._dtype.itemsize
        least = 1e3 * nbytes / self._copy
        self._time(f"cliff, decode, {name}", [1] * len(keys), keys, heads, least)

    def _prefill(self, name: str, new: int, keys: int, heads: tuple[int, int, int]) -> None:
        seen = new * (keys - new) + new * (new + 1) / 2
        nbytes = 2 * keys * heads[1] * heads[2] * self._dtype.itemsize
        least = 1e3 * max(4.0 * seen * heads[0] * heads[2] / self._products, nbytes / self._copy)
        self._time(f"cliff, prefill, {name}", [new], [keys], heads, least)

    def _time(
        self,
        metric: str,
        new: Sequence[int],
        keys: Sequence[int],
        shape: tuple[int, int, int],
        least: float,
    ) -> None:
        def measure() -> Figure:
            heads, kv_heads, dim = shape
            rows = rows_of(new, keys, self._device)
            slots = int(rows.page_table.max() + 1) * PAGE
            nbytes = 2 * slots * kv_heads * dim * self._dtype.itemsize
            q = self._noise(sum(new), heads, dim)
            works = []
            for _ in range(copies_for(nbytes, self._device)):
                kept, values = (self._noise(slots, kv_heads, dim) for _ in range(2))
                cache = plain_cache(kept, values)
                works.append(partial(launch_paged, q, cache, rows, dim**-0.5))
            return Figure(metric, device_ms(works, self._device), "ms", floor=least)

        self._file.attempt(metric, measure, unit="ms")

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)


def main() -> int:
    args = stage_arguments(__doc__)
    torch.manual_seed(0)
    file = FigureFile(args.figures)
    file.attempt("cliffs", lambda: Cliffs(args, file).run())
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
