"""The launches that `aot.py` inspects: each kernel with the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from saccade.kernels import device
from saccade.kernels.matrix import Fp8Experts, Fp8Matrix, Stack
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.delta import StateRows
from saccade.kernels.reference.int4 import pack_int4
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.low_rank import Additions, Pair, Present
from saccade.kernels.reference.paged import PagedCache, PagedRows, plain_cache, plain_shape
from saccade.kernels.reference.rotary import rotary_tables
from saccade.kernels.reference.sample import COLUMNS
from saccade.plugins.gpu.triton import delta as delta_gpu
from saccade.plugins.gpu.triton import edits as edits_gpu
from saccade.plugins.gpu.triton import experts as experts_gpu
from saccade.plugins.gpu.triton import fp8 as fp8_gpu
from saccade.plugins.gpu.triton import int4 as int4_gpu
from saccade.plugins.gpu.triton import layer as layer_gpu
from saccade.plugins.gpu.triton import low_rank as low_rank_gpu
from saccade.plugins.gpu.triton import paged as paged_gpu
from saccade.plugins.gpu.triton import paged_decode as paged_decode_gpu
from saccade.plugins.gpu.triton import rotary as rotary_gpu
from saccade.plugins.gpu.triton import sample as sample_gpu
from saccade.plugins.gpu.triton import scaled as scaled_gpu
from saccade.plugins.gpu.triton import segments as segments_gpu
from saccade_bench.lab.aot_case import KernelCase, Promise

HALF = torch.bfloat16
PAGE = 16
TOKENS = 64
VOCAB = 151936
TEXT_SHAPES = (
    *((32, 8, 128), (28, 4, 128), (16, 2, 128), (32, 4, 128)),
    *((16, 8, 64), (14, 2, 64), (16, 4, 256)),
)
"""Heads, KV heads and head size of Qwen3-VL-8B, Qwen2.5-VL-7B and 3B, Qwen3-VL-30B-A3B, a model
with heads of 64, InternVL3-1B and Qwen3.5-9B.
"""
RANGED_SHAPES = ((8, 4, 256), (32, 16, 128))
"""Gemma 3 4B and 27B. Most layers have sliding windows, and images have bidirectional attention."""
FAR_SHAPES = ((8, 1, 512), (8, 2, 512), (16, 2, 512))
"""Full-attention layers of Gemma 4 E2B, E4B and 26B-A4B. 31B has the same ratio as 26B-A4B."""
NEAR_SHAPES = ((8, 1, 256), (8, 2, 256))
"""Layers of Gemma 4 E2B and E4B with windows of 512. Larger models have the shapes of Gemma 3."""
WINDOW = 1024
FP8_SHAPES = ((6144, 2560), (2560, 4096), (19_456, 2560))
"""Outputs and inputs of Qwen3-VL-4B: QKV projection, its output projection, and gate and up (tiles
of small batches).
"""
SCALED_SHAPES = ((2560, 128), (9728, 128), (4096, 4096), (12288, 12288))
"""Width of a row, and values per scale: Qwen3-VL-4B with block scales, and 8B with row scales."""
INT4_SHAPES = ((2560, 4096), (19_456, 2560))
"""Outputs and inputs of the narrowest and the widest matrices of Qwen3-VL-4B."""
INT4_KINDS = ((128, True, False), (32, False, False), (0, False, True))
"""Inputs per scale (0: all), and whether there are zero points and a permutation of the inputs, for
AWQ, compressed-tensors, and GPTQ with desc_act and one scale.
"""
LATENT, LATENT_HEADS = 576, (16, 128)
"""Latent size of DeepSeek-V2 (512 + 64), and heads of its small and large models."""
LORA_SHAPES = (((4096, 1024, 1024), 2560), ((9728, 9728), 2560), ((2560,), 9728))
"""Outputs and inputs of Qwen3-VL-4B: QKV, gate and up, and down projection."""
LORA_RANKS = (16, 64)
FIRST_FP8 = 89
"""The first architecture with instructions to convert from and to FP8."""
EXPERTS = ((2048, 768, 128, 8),)
"""Hidden size, width, experts, and experts per token of Qwen3-VL-30B-A3B."""
GELU_EXPERTS = (2816, 704, 128, 8)
"""The same for Gemma 4 26B-A4B."""
DELTA_HEADS = ((16, 32), (16, 48))
"""Key and value heads of the gated delta rule in Qwen3.5-9B and 27B."""
DELTA_DIM = 128
TOWER_HEADS = 16
TOWER_HEAD_SIZES = (64, 72, 80)
"""Head sizes of the vision encoders of Qwen3-VL (small and large), and Qwen2-VL and Qwen2.5-VL."""


DECODED: dict[str, Promise] = {
    "_share": Promise(access=4),  # row indices
    "_decode": Promise(),
    "_merge": Promise(access=4),  # one row of a few hundred bytes
}
PREFILLED: dict[str, Promise] = {"_prefill": Promise(hgmma=True), "_join": Promise(access=4)}


def cases() -> Iterator[KernelCase]:
    """Yield all cases."""
    yield from _text_cases()
    yield from _ranged_cases()
    yield from _expert_cases()
    yield from _delta_cases()
    yield from _tower_cases()
    one = {"_sample": Promise(access=4)}  # the result is one token
    for masked in (False, True):
        name = "sample" + (" under a mask" if masked else "")
        yield KernelCase(name, sample_gpu, partial(_sample, masked), one)
        crowd = partial(_sample, masked, 2 * device.multiprocessors(torch.device("cpu")))
        yield KernelCase(f"{name}, in many slots", sample_gpu, crowd, one)
        # Only the few tokens of a block that already occurred are accessed.
        each = {"_edit": Promise(access=4), "_count": Promise(access=4)}
        name = "edits" + (" under a mask" if masked else "")
        yield KernelCase(name, edits_gpu, partial(_edits, masked), each)


def _ranged_cases() -> Iterator[KernelCase]:
    for shape in RANGED_SHAPES:
        heads, kv_heads, dim = shape
        name = f"{heads}/{kv_heads} heads of {dim}"
        run = partial(_paged, TOKENS, *shape, window=WINDOW)
        yield KernelCase(f"paged decode, {name}, windows", paged_decode_gpu, run, DECODED)
        run = partial(_paged, 0, *shape, window=WINDOW)
        yield KernelCase(f"paged prefill, {name}, windows", paged_gpu, run, PREFILLED)
        run = partial(_paged, 0, *shape, images=True)
        yield KernelCase(f"paged prefill, {name}, images", paged_gpu, run, PREFILLED)
        run = partial(_paged, 0, *shape, window=WINDOW, images=True)
        yield KernelCase(f"paged prefill, {name}, windows and images", paged_gpu, run, PREFILLED)
    few = PREFILLED | {"_prefill": Promise()}  # too few rows for Hopper's instructions
    for shape in FAR_SHAPES:
        name = "{}/{} heads of {}".format(*shape)
        for kept, least in ((HALF, 0), (torch.float8_e4m3fn, FIRST_FP8)):
            eight = ", 8 bits" if least else ""
            run = partial(_paged, TOKENS, *shape, kept)
            yield KernelCase(f"paged decode, {name}{eight}", paged_decode_gpu, run, DECODED, least)
            run = partial(_paged, 0, *shape, kept)
            yield KernelCase(f"paged prefill, {name}{eight}", paged_gpu, run, few, least)
        turned = {"_rope_and_cache": Promise()}
        yield KernelCase(f"turn and cache, {name}", layer_gpu, partial(_turn, *shape), turned)
    for shape in NEAR_SHAPES:
        name = "{}/{} heads of {}, windows of 512".format(*shape)
        run = partial(_paged, TOKENS, *shape, window=512)
        yield KernelCase(f"paged decode, {name}", paged_decode_gpu, run, DECODED)
        run = partial(_paged, 0, *shape, window=512)
        yield KernelCase(f"paged prefill, {name}", paged_gpu, run, PREFILLED)
    run = partial(_rotate_far, 8, 512)  # of layers that reuse another layer's keys
    yield KernelCase("rotary, 8 heads of 512", rotary_gpu, run, {"_rotate": Promise()})
    for heads in LATENT_HEADS:
        name = f"{heads} heads, latents of {LATENT}"
        run = partial(_paged, TOKENS, heads, 1, LATENT, latents=True)
        yield KernelCase(f"paged decode, {name}", paged_decode_gpu, run, DECODED)
        run = partial(_paged, 0, heads, 1, LATENT, latents=True)
        yield KernelCase(f"paged prefill, {name}", paged_gpu, run, few)


def _text_cases() -> Iterator[KernelCase]:
    for shape in TEXT_SHAPES:
        heads, kv_heads, dim = shape
        name = f"{heads}/{kv_heads} heads of {dim}"
        run = partial(_paged, TOKENS, *shape)
        yield KernelCase(f"paged decode, {name}", paged_decode_gpu, run, DECODED)
        yield KernelCase(f"paged prefill, {name}", paged_gpu, partial(_paged, 0, *shape), PREFILLED)
        turned = {"_rope_and_cache": Promise()}
        yield KernelCase(f"turn and cache, {name}", layer_gpu, partial(_turn, *shape), turned)
    name = "32/8 heads of 128, 8 bits"
    eight = partial(_paged, TOKENS, 32, 8, 128, torch.float8_e4m3fn)
    yield KernelCase(f"paged decode, {name}", paged_decode_gpu, eight, DECODED, FIRST_FP8)
    eight = partial(_paged, 0, 32, 8, 128, torch.float8_e4m3fn)
    yield KernelCase(f"paged prefill, {name}", paged_gpu, eight, PREFILLED, FIRST_FP8)
    turned = {"_rope_and_cache": Promise()}
    eight = partial(_turn, 32, 8, 128, torch.float8_e4m3fn)
    yield KernelCase(f"turn and cache, {name}", layer_gpu, eight, turned, FIRST_FP8)
    for outputs, inputs in FP8_SHAPES:
        for group in (128, inputs):
            name = f"FP8 product, {inputs} to {outputs}, scales of {group}"
            # A tile of 16 outputs and 16 rows has two values per thread.
            each = {"_few": Promise(stores=4), "_product": Promise(hgmma=True)}
            run = partial(_product, outputs, inputs, group)
            yield KernelCase(name, fp8_gpu, run, each, FIRST_FP8)
    for size, group in SCALED_SHAPES:
        name = f"rows of {size} in 8 bits, scales of {group}"
        kernels = ("_quantise", "_add_norm_scaled", "_gate_scaled")
        run = partial(_scaled, size, group)
        yield KernelCase(name, scaled_gpu, run, dict.fromkeys(kernels, Promise()), FIRST_FP8)
    for outputs, inputs in INT4_SHAPES:
        for group, zeros, ordered in INT4_KINDS:
            name = f"4-bit product, {inputs} to {outputs}, scales of {group or inputs}"
            # A tile of 16 outputs and 16 rows has two values per thread.
            each = {"_few": Promise(stores=4), "_many": Promise(hgmma=True)}
            run = partial(_int4, outputs, inputs, group or inputs, zeros, ordered)
            yield KernelCase(name, int4_gpu, run, each)
    for parts, inputs in LORA_SHAPES:
        name = f"adapters of {len(LORA_RANKS)}, {inputs} to {' and '.join(map(str, parts))}"
        run = partial(_adapters, parts, inputs)
        # A tile of 16 rows and 32 ranks has four accumulators per thread.
        yield KernelCase(
            name, low_rank_gpu, run, {"_shrink": Promise(stores=8), "_expand": Promise()}
        )
    for size in (2048, 4096):
        each = {"_add_norm": Promise()}
        yield KernelCase(f"add and RMS norm, {size}", layer_gpu, partial(_norm, size, False), each)
    for act, size in (("SiLU", 6144), ("SiLU", 12_288), ("GELU", 6144)):
        both = torch.empty(TOKENS, 2 * size, dtype=HALF)
        gated = partial(layer_gpu.launch_gate, both, "silu" if act == "SiLU" else "gelu_tanh")
        yield KernelCase(f"{act} gate, {size}", layer_gpu, gated, {"_gate": Promise()})


def _expert_promises(rows: int) -> dict[str, Promise]:
    each = Promise(stores=4) if rows == 1 else Promise(hgmma=True)
    return {"_up": each, "_down": each, "_place": Promise(access=4), "_sum": Promise()}


def _expert_cases() -> Iterator[KernelCase]:
    for shape in EXPERTS:
        run = partial(_routes, *shape[2:])
        name = f"routes to {shape[3]} of {shape[2]} experts"
        yield KernelCase(name, experts_gpu, run, {"_route": Promise(access=8)})
        for group in (0, 128, shape[0]):
            eight = f", FP8, scales of {group}" if group else ""
            name = f"experts, {shape[2]} of {shape[0]} by {shape[1]}{eight}"
            for rows in (1, 512, 8192):
                run = partial(_experts, *shape, rows, group)
                least = FIRST_FP8 if group else 0
                promises = _expert_promises(rows)
                yield KernelCase(f"{name}, {rows} rows", experts_gpu, run, promises, least)
    for rows in (1, 512, 8192):
        name = "experts, {2} of {0} by {1}, GELU, {3} rows".format(*GELU_EXPERTS[:3], rows)
        run = partial(_experts, *GELU_EXPERTS, rows, 0, "gelu_tanh")
        yield KernelCase(name, experts_gpu, run, _expert_promises(rows))


def _delta_cases() -> Iterator[KernelCase]:
    products = Promise(hgmma=True)
    promises = {"_delta": Promise(), "_solve": products, "_scan": products}
    convolved = {"_conv": Promise(access=4), "_remember": Promise()}
    for key_heads, heads in DELTA_HEADS:
        name = f"{heads}/{key_heads} heads of {DELTA_DIM}"
        run = partial(_delta, key_heads, heads)
        yield KernelCase(f"gated delta rule, {name}", delta_gpu, run, promises)
        run = partial(_conv, (2 * key_heads + heads) * DELTA_DIM)
        yield KernelCase(f"causal convolution, {name}", delta_gpu, run, convolved)


def _tower_cases() -> Iterator[KernelCase]:
    each = {"_add_norm": Promise()}
    yield KernelCase("add and layer norm, 1152", layer_gpu, partial(_norm, 1152, True), each)
    for dim in TOWER_HEAD_SIZES:
        # Rows of 36 pairs of 2 bytes are only aligned to 8 bytes.
        turned = {"_rotate": Promise(access=8 if dim == 72 else 16)}
        yield KernelCase(f"rotary, heads of {dim}", rotary_gpu, partial(_rotate, dim), turned)
        for longest in (64, 4096):
            name = f"segments of {longest}, heads of {dim}"
            attended = {"_list": Promise(access=4), "_attend": Promise(hgmma=True)}
            yield KernelCase(name, segments_gpu, partial(_segments, dim, longest), attended)


def _rows(lengths: Sequence[int], singles: int) -> PagedRows:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    count = len(lengths)
    table = torch.zeros((count, 1024), dtype=torch.int32)
    lines = torch.zeros(count, dtype=torch.int64)
    return PagedRows(starts, torch.ones(count, dtype=torch.int32), lines, table, PAGE, singles)


def _paged(
    singles: int,
    heads: int,
    kv_heads: int,
    dim: int,
    kept: torch.dtype = HALF,
    *,
    window: int | None = None,
    images: bool = False,
    latents: bool = False,
) -> None:
    """Launch decode for `singles` sequences, or a prefill chunk if 0. `images` have bidirectional
    attention.
    """
    keys = torch.empty((1024, kv_heads, dim), dtype=kept)
    values = keys if latents else torch.empty_like(keys)
    q = torch.empty((TOKENS, heads, dim), dtype=HALF)
    rows = _rows([1] * singles or [TOKENS], singles)  # few tokens, so that KV is split
    if images:
        rows = replace(rows, sees=torch.ones(TOKENS, dtype=torch.int64))
    shape = replace(plain_shape(keys, values), window=window, both_ways=images)
    paged_gpu.launch_paged(q, PagedCache(keys, values, shape=shape), rows, 0.1)


def _states(lengths: Sequence[int], singles: int) -> StateRows:
    rows = _rows(lengths, singles)
    return StateRows(rows.q_starts, rows.kv_lengths, rows.lines, singles)


def _delta(key_heads: int, heads: int) -> None:
    """Launch decode, and prefill of two sequences."""
    keys, values = key_heads * DELTA_DIM, heads * DELTA_DIM
    mixed = torch.empty((TOKENS, 2 * keys + values), dtype=HALF)
    places = (slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, None))
    q, k, v = (mixed[:, place].view(TOKENS, -1, DELTA_DIM) for place in places)
    thin = torch.empty((TOKENS, heads))
    states = torch.empty((64, heads, DELTA_DIM, DELTA_DIM))
    for rows in (_states([1] * TOKENS, TOKENS), _states([TOKENS // 2] * 2, 0)):
        delta_gpu.launch_delta(q, k, v, thin, thin, states, rows)


def _conv(channels: int) -> None:
    x, weight = torch.empty((TOKENS, channels), dtype=HALF), torch.empty((4, channels), dtype=HALF)
    states = torch.empty((64, 3, channels), dtype=HALF)
    for rows in (_states([1] * TOKENS, TOKENS), _states([TOKENS // 2] * 2, 0)):
        for silu in (True, False):
            delta_gpu.launch_conv(x, weight, states, rows, silu=silu)


def _turn(heads: int, kv_heads: int, dim: int, kept: torch.dtype = HALF) -> None:
    qkv = torch.empty((TOKENS, heads + 2 * kv_heads, dim), dtype=HALF)
    keys = torch.empty((1024, kv_heads, dim), dtype=kept)
    cache = plain_cache(keys, keys)
    weight = torch.empty((heads + kv_heads, dim), dtype=HALF)
    table = torch.empty((TOKENS, dim))
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    layer_gpu.launch_rope_and_cache(
        qkv, kv_heads, table, table, QKNorm(weight, 1e-6), cache, slots, halves=True
    )


def _product(outputs: int, inputs: int, group: int) -> None:
    """Launch a small batch and a large one."""
    values = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn)
    matrix = Fp8Matrix(values, torch.empty((outputs, inputs // group)), group)
    for rows in (1, 512):
        fp8_gpu.launch_fp8(torch.empty((rows, inputs), dtype=HALF), matrix, None)


def _scaled(size: int, group: int) -> None:
    x, weight = torch.empty((TOKENS, size), dtype=HALF), torch.empty(size, dtype=HALF)
    scaled_gpu.launch_quantise(x, group)
    scaled_gpu.launch_add_norm_scaled(x, x, weight, 1e-6, group)
    scaled_gpu.launch_silu_gate_scaled(torch.empty((TOKENS, 2 * size), dtype=HALF), group)


def _int4(outputs: int, inputs: int, group: int, zeros: bool, ordered: bool) -> None:
    """Launch batches of four sizes, each with another kernel or tile."""
    numbers = torch.zeros((outputs, inputs), dtype=torch.uint8)
    scales = torch.ones((outputs, inputs // group), dtype=torch.float16)
    points = torch.zeros_like(scales, dtype=torch.uint8) if zeros else None
    order = torch.arange(inputs) if ordered else None
    matrix = pack_int4(numbers, scales, points, group, order)
    for rows in (1, 64, 256, 4096):
        int4_gpu.launch_int4(torch.empty((rows, inputs), dtype=HALF), matrix, None)


def _adapters(parts: Sequence[int], inputs: int) -> None:
    """Launch two adapters of different ranks, each for half of the rows."""
    ends = accumulate(parts, initial=0)
    places = [slice(*pair) for pair in pairwise(ends)]
    additions = Additions(places)
    for place, rank in enumerate(LORA_RANKS):
        down = torch.empty((rank * len(parts), inputs), dtype=HALF)
        ups = tuple(
            (outputs, slice(at * rank, (at + 1) * rank), torch.empty((size, rank), dtype=HALF))
            for at, (outputs, size) in enumerate(zip(places, parts))
        )
        additions.put(place, Pair(down, ups))
    present = Present(((0, slice(0, TOKENS // 2)), (1, slice(TOKENS // 2, TOKENS))))
    x, y = (torch.empty((TOKENS, size), dtype=HALF) for size in (inputs, sum(parts)))
    low_rank_gpu.launch_low_rank(x, y, additions, present)


def _routes(count: int, top: int) -> None:
    experts_gpu.launch_route(torch.empty((TOKENS, count), dtype=HALF), top)


def _experts(
    hidden: int,
    width: int,
    count: int,
    top: int,
    rows: int,
    group: int,
    act: Activation = "silu",
) -> None:
    """Launch experts, in FP8 unless `group` is 0."""

    def stacked(outputs: int, inputs: int) -> Stack:
        if not group:
            return torch.empty((count, outputs, inputs), dtype=HALF)
        each = min(group, inputs)
        values = torch.empty((count, outputs, inputs), dtype=torch.float8_e4m3fn)
        return Fp8Experts(values, torch.empty((count, outputs, inputs // each)), each)

    experts_gpu.launch_experts(
        torch.empty((rows, hidden), dtype=HALF),
        torch.zeros((rows, top), dtype=torch.int64),
        torch.empty((rows, top), dtype=HALF),
        stacked(2 * width, hidden),
        stacked(hidden, width),
        0,
        act,
    )


def _norm(size: int, centred: bool) -> None:
    x, weight = torch.empty((TOKENS, size), dtype=HALF), torch.empty(size, dtype=HALF)
    layer_gpu.launch_add_norm(x, x, weight, weight if centred else None, 1e-6)


def _rotate(dim: int) -> None:
    qkv = torch.empty((TOKENS, 3 * TOWER_HEADS, dim), dtype=HALF)
    places = torch.zeros((2, TOKENS), dtype=torch.int64)
    axis = torch.zeros(dim // 2, dtype=torch.int64)
    tables = rotary_tables(torch.zeros((128, dim // 2)))
    rotary_gpu.launch(qkv[:, : 2 * TOWER_HEADS], *tables, places, axis, halves=True)


def _rotate_far(heads: int, dim: int) -> None:
    """Apply RoPE with a separate row of the tables for each token."""
    tables = rotary_tables(torch.zeros((TOKENS, dim // 2)))
    q = torch.empty((TOKENS, heads, dim), dtype=HALF)
    rotary_gpu.launch(q, *tables, None, None, halves=True)


def _segments(dim: int, longest: int) -> None:
    qkv = torch.empty((longest, 3 * TOWER_HEADS, dim), dtype=HALF)
    bounds = torch.zeros(2, dtype=torch.int32)
    q, k, v = qkv.chunk(3, dim=1)
    segments_gpu.launch_segments(q, k, v, bounds, bounds, longest, 0.1)


def _sample(masked: bool, slots: int = 4) -> None:
    masks = torch.zeros((4, -(-VOCAB // 32)), dtype=torch.int32) if masked else None
    sample_gpu.launch_sample(
        torch.empty((4, VOCAB)),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros((slots, COLUMNS)),
        torch.zeros(4, dtype=torch.float64),
        masks,
        torch.zeros(4, dtype=torch.int64),
    )


def _edits(masked: bool) -> None:
    slots = torch.zeros(4, dtype=torch.int64)
    tables = edits_gpu.EditTables(
        facts=torch.zeros((4, 3), dtype=torch.int32),
        weights=torch.ones((4, 3)),
        entries=torch.zeros((4, 2064), dtype=torch.int32),
        amounts=torch.zeros((4, 2064)),
        counts=torch.zeros((4, VOCAB), dtype=torch.int32),
    )
    edits_gpu.launch_edit(torch.zeros((4, VOCAB)), slots, tables, masked)
    edits_gpu.launch_count(slots, tables, torch.zeros(4, dtype=torch.int64))
