"""`python -m saccade_bench.attention_ways`: the ways of attention on a CPU beside each other, at
the shapes of towers, prompts and answers.

Ways take turns; figures are the least CPU time of a thread's calls, in ms. A way is *ahead* where
it takes at most 95 % of the next one's time. Ends with the ways that are ahead nowhere: candidates
to be removed. Those of a processor's kind (*blocks* serves those without AMX; *amx* and *pairs*, by
AVX512-BF16, are our own code, whichever the processor runs best) say something on such a processor
alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from saccade.kernels.device import has_numba
from saccade.kernels.reference import attention, long_attention
from saccade.kernels.reference.paged import PagedRows, PagedShape, plain_cache
from saccade.kernels.reference.sdpa import SdpaAttention
from saccade.kernels.x86.attention import (
    KeyLayout,
    attend,
    best_kind,
    lay_out_causal,
    lay_out_segments,
    runs,
)

PAGE = 16
HEADS, KV_HEADS, DIM = 16, 8, 128
"""Of Qwen3-VL-2B."""
SMALL = (4, 2, 64)
"""Of the demo model."""
AHEAD = 0.95
Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """`ways` of one problem. seconds: how long they may take in all."""

    name: str
    ways: Mapping[str, Way]
    seconds: float = 3.0


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def made_here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: KeyLayout, scale: float
) -> dict[str, Way]:
    """Our own code for this processor, where it has any for such heads."""
    kind = best_kind()
    if kind is None or not runs(q.dtype, q.shape[2]):
        return {}
    return {kind: partial(attend, q, k, v, layout, scale)}


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of q [G, Hkv, L, D] by one call with a mask."""
    length, keys = q.shape[2], k.shape[2]
    mask = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def prompts(dtype: torch.dtype, before: int, length: int = 512) -> Case:
    """A chunk of a prompt after `before` tokens."""
    scale, group, keys = DIM**-0.5, HEADS // KV_HEADS, before + length
    q = noise(length, HEADS, DIM, dtype=dtype)
    rows = [noise(keys, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
    k, v = (each.transpose(0, 1).unsqueeze(0) for each in rows)
    queries = q.view(length, KV_HEADS, group, DIM).permute(2, 1, 0, 3)
    keys_wide, values_wide = (each.expand(group, -1, -1, -1) for each in (k, v))
    ways: dict[str, Way] = {
        "merged": lambda: attention._merged(queries, keys_wide, values_wide, scale),
        "masked": lambda: masked(queries, keys_wide, values_wide, scale),
    }
    if dtype == torch.bfloat16:
        ways["blocks"] = lambda: long_attention.attend(q, k[0], v[0], scale, causal=True)
    layout = lay_out_causal([(0, length, keys)], [np.arange(keys)], group)
    ways |= made_here(q, rows[0], rows[1], layout, scale)
    return Case(f"prompt of {length} after {before}, {name_of(dtype)}", ways, 5.0)


def answers(
    dtype: torch.dtype,
    rows: int,
    context: int,
    sizes: tuple[int, int, int] = (HEADS, KV_HEADS, DIM),
) -> Case:
    """Rows that decode, each after so many tokens: on pages that follow each other, or do not.
    sizes: heads, key heads, values of one.
    """
    heads, kv_heads, dim = sizes
    pages = -(-context // PAGE)
    count = 1 + 2 * rows * pages
    lying = (count * PAGE, kv_heads, dim)
    cache = plain_cache(noise(*lying, dtype=dtype), noise(*lying, dtype=dtype))
    near = torch.arange(1, 1 + rows * pages, dtype=torch.int32).view(rows, pages)
    shape = PagedShape(kv_heads, dim, PAGE, dtype, dtype)
    q, scale = noise(rows, heads, dim, dtype=dtype), shape.scale

    def planned(table: torch.Tensor) -> PagedRows:
        starts = torch.arange(rows + 1, dtype=torch.int32)
        lengths = torch.full((rows,), context, dtype=torch.int32)
        return PagedRows(starts, lengths, torch.arange(rows), table, PAGE, rows)

    def alone(table: torch.Tensor) -> Way:
        backend = SdpaAttention(shape)
        backend._abreast_keys = 0
        backend.plan(planned(table))
        return partial(backend, q, cache)

    ways: dict[str, Way] = {"in place": alone(near), "gathered": alone(near.flip(1).contiguous())}
    together = SdpaAttention(shape)
    together._places = torch.arange(context).numpy()
    together._strip = torch.cat((torch.zeros(context), torch.full((context,), -math.inf))).to(dtype)
    page, offset = divmod(together._places, PAGE)
    together._lies = page, offset
    shared = together._together(near.numpy(), [*range(rows)], [context] * rows)
    ways["shared"] = lambda: shared(q, cache)
    if dtype == torch.bfloat16 and has_numba():
        # Imported where it runs: elsewhere Numba need not be installed.
        from saccade.kernels.x86.paged import decode_paged, scratch_values

        scratch = torch.empty(scratch_values(rows, heads, dim))
        ways["compiled"] = partial(decode_paged, q, cache, planned(near), scale, scratch)
    return Case(f"{rows} rows after {context}, {heads} heads, {name_of(dtype)}", ways)


def towers(dtype: torch.dtype, rows: int, dim: int, heads: int, window: int = 0) -> Case:
    """Rows of an image that all see each other, or in windows."""
    scale = dim**-0.5
    q, k, v = (noise(rows, heads, dim, dtype=dtype) for _ in range(3))
    length = window or rows
    cut = (-1, length, heads, dim)
    qs, ks, vs = (each.view(cut).transpose(1, 2) for each in (q, k, v))

    def one_by_one() -> None:
        for query, key, value in zip(qs, ks, vs):
            part = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            F.scaled_dot_product_attention(*part, scale=scale)

    ways: dict[str, Way] = {
        "batched": lambda: F.scaled_dot_product_attention(qs, ks, vs, scale=scale),
        "one by one": one_by_one,
    }
    if dtype == torch.bfloat16 and not window:
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        ways["blocks"] = lambda: long_attention.attend(q, keys, values, scale, causal=False)
    ways |= made_here(q, k, v, lay_out_segments((length,) * (rows // length)), scale)
    shown = f"windows of {window} of {rows}" if window else f"{rows} rows"
    return Case(f"{shown} of {heads} heads of {dim}, {name_of(dtype)}", ways, 20.0)


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for before in (1536, 8192):
            yield prompts(dtype, before)
        for context in (256, 2048, 8192):
            for rows in (1, 8):
                yield answers(dtype, rows, context)
        for context in (32, 256):
            for rows in (4, 32):
                yield answers(dtype, rows, context, SMALL)
        yield towers(dtype, 3600, 64, 8)
        yield towers(dtype, 3584, 64, 8, window=64)
    yield towers(torch.bfloat16, 3584, 80, 16, window=64)
    yield towers(torch.bfloat16, 14400, 72, 16)


def measure(case: Case) -> dict[str, float]:
    """Milliseconds of CPU time of each way, the least of all turns."""
    found = dict.fromkeys(case.ways, math.inf)
    for way in case.ways.values():
        way()
    end = time.process_time() + case.seconds
    turns = 0
    while turns < 2 or (time.process_time() < end and turns < 200):
        turns += 1
        for name, way in case.ways.items():
            start = time.process_time()
            way()
            found[name] = min(found[name], 1000 * (time.process_time() - start))
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX")
    ahead: set[str] = set()
    known: set[str] = set()
    for case in cases():
        if options.only not in case.name:
            continue
        found = measure(case)
        known |= set(found)
        order = sorted(found, key=found.__getitem__)
        best, next_best = order[0], order[1]
        clear = found[best] <= AHEAD * found[next_best]
        if clear:
            ahead.add(best)
        shown = ", ".join(f"{name} {found[name]:.3g}" for name in order)
        print(f"{case.name}: {shown}{' ms: ' + best if clear else ' ms: alike'}", flush=True)
    print(f"ahead somewhere: {', '.join(sorted(ahead))}")
    print(f"ahead nowhere: {', '.join(sorted(known - ahead)) or 'none'}")


if __name__ == "__main__":
    main()
