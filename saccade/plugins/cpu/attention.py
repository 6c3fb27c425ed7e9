"""Attention in bfloat16 on x86 CPUs with AMX or AVX512-BF16. It is bidirectional within segments
for vision encoders, and causal over KV pages for language models.

LLVM compiles `attention_code.py` for each head size at first use. Scores stay in a core's cache.
Results are batch-invariant, and do not depend on the number of threads, because a query's result
depends only on the keys and values of its own segment or sequence.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from saccade.kernels.matrix import FP8
from saccade.kernels.processor import has_bf16
from saccade.kernels.reference.paged import PagedCache, PagedRows
from saccade.kernels.reference.segments import Segments, sdpa_segments
from saccade.plugins.cpu.amx import has_amx, tile_setting
from saccade.plugins.cpu.attention_call import (
    BLOCK_FIELDS,
    CHUNK,
    FIELDS,
    MAX_HEAD,
    NAMES,
    QUERY_BLOCK,
    Call,
)
from saccade.plugins.cpu.kernel import SHARED_VALUES, run_on_threads
from saccade.plugins.cpu.machine_code import Function, compiled

Isa = Literal["amx", "pairs"]
"""The instructions that kernels use: AMX's tiles, or AVX512-BF16's pairs."""
PACKED_VALUES = 1 << 23
"""Maximum number of key values to pack at a time, but at least one head's. Bounds temporary
memory.
"""
MAX_PAGED_QUERIES = 32
"""Maximum number of a sequence's tokens in a step for which its KV pages are read in place. For
more tokens, keys and values are packed first.
"""
BF16 = torch.bfloat16
KV_DTYPES = (BF16, FP8)
"""Supported dtypes of keys and values. FP8 is converted to bfloat16 exactly."""
ZEROS = torch.zeros(MAX_HEAD, dtype=BF16)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Implement `long_attention.Softmax`. Imports the kernel at the first call, because few models
    need it.
    """
    from saccade.plugins.cpu.long_attention import softmax_to_bfloat16

    return softmax_to_bfloat16(scores)


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The blocks of queries of an attention call, and the keys that each block attends to.

    `attention_call` describes the columns of `table` (BLOCK_FIELDS).
    """

    rows: torch.Tensor  # [chunks * CHUNK] int64: each key's index in k and v, -1 for padding
    table: torch.Tensor  # [blocks, BLOCK_FIELDS] int64
    fold: int = 1  # query heads interleaved in a block's rows
    independent: bool = False  # each block has few keys, and shares none with another block


@cache
def best_isa() -> Isa | None:
    """Return the best instructions that the CPU and the operating system support, or `None`."""
    if find_spec("llvmlite") is None or not has_bf16():
        return None
    return "amx" if has_amx("amx-bf16") else "pairs"


def runs(dtype: torch.dtype, dim: int) -> bool:
    """Return True if `attend` supports queries of this dtype and head size on this machine.

    Keys and values may have any of `KV_DTYPES`.
    """
    return dtype == BF16 and dim % 2 == 0 and 0 < dim <= MAX_HEAD and best_isa() is not None


def takes(q: torch.Tensor) -> bool:
    """Return True if `attend` supports queries like q on this machine.

    `attend` is then the fastest implementation. Only for a few rows with a few keys, it takes some
    microseconds longer (decision 006).
    """
    return q.device.type == "cpu" and runs(q.dtype, q.shape[-1])


def attend_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Implement `reference.segments.TowerAttention`, with all segments in one call."""
    if not takes(q):
        return sdpa_segments(q, k, v, segments, scale, softmax)
    if len(k) > len(q):
        return attend(q, k, v, full_layout(len(q), len(k)), scale)
    lengths = tuple(end - start for start, end in pairwise(segments.bounds.tolist()))
    return attend(q, k, v, segment_layout(lengths), scale)


@cache
def functions(dim: int, kind: Isa, kv_dtype: torch.dtype) -> Mapping[str, Function]:
    """Return the functions "pack" and "attend" for keys and values in `kv_dtype`.

    Compiling them takes a quarter of a second, once per machine. Later processes load them from
    disk.
    """
    agreed = "attention_call", "llvm", "attention_pack"
    return compiled(NAMES, "attention_code", agreed, dim, kind, kv_dtype.itemsize)


@lru_cache(maxsize=16)
def full_layout(rows: int, keys: int) -> KeyLayout:
    """Return the layout for `rows` rows that all attend to the same `keys` keys."""
    return _layout([(0, rows, keys, keys)], [np.arange(keys)])


@lru_cache(maxsize=16)  # each layer of a vision encoder needs the same layout
def segment_layout(lengths: tuple[int, ...]) -> KeyLayout:
    """Return the layout for consecutive segments. Rows attend to all keys of their segment.

    lengths: the number of rows in each segment.
    """
    starts = np.cumsum([0, *lengths])
    spans = [(int(start), int(end) - int(start)) for start, end in pairwise(starts)]
    keys = [np.arange(start, start + length) for start, length in spans]
    return _layout([(start, length, length, length) for start, length in spans], keys)


def causal_layout(
    rows: Sequence[tuple[int, int, int]],
    positions: Sequence[npt.NDArray[np.int64]],
    group: int = 1,
) -> KeyLayout:
    """Return the layout for causal attention.

    rows: (first row, number of rows, number of keys) of each sequence. Its rows are the last keys.
    positions: for each sequence, the indices of its keys in k and v.
    group: the number of query heads per key head.
    """
    parts = [(first, count, keys, keys - count + 1) for first, count, keys in rows]
    return _layout(parts, positions, group)


def _layout(
    parts: Sequence[tuple[int, int, int, int]],
    positions_of: Sequence[npt.NDArray[np.int64]],
    fold: int = 1,
) -> KeyLayout:
    """Return the layout for consecutive parts that have separate keys.

    parts: (first row, number of rows, number of keys, keys that the first row attends to) of each.
        Every further row attends to one more key, up to all of them.
    positions_of: for each part, the indices of its keys in k and v.
    """
    chunks = [-(-keys // CHUNK) for _, _, keys, _ in parts]
    rows = np.full(max(1, sum(chunks)) * CHUNK, -1, np.int64)
    table, chunk, step = [], 0, QUERY_BLOCK // fold
    for (first, count, keys, seen), num_chunks, positions in zip(
        parts, chunks, positions_of, strict=True
    ):
        rows[chunk * CHUNK : chunk * CHUNK + keys] = positions
        table += [
            (first + start, min(step, count - start), chunk, keys, min(keys, seen + start))
            for start in range(0, count, step)
        ]
        chunk += num_chunks
    blocks = torch.tensor(table, dtype=torch.int64).view(-1, len(BLOCK_FIELDS))
    near = all(count <= step and keys <= QUERY_BLOCK for _, count, keys, _ in parts)
    return KeyLayout(torch.from_numpy(rows), blocks, fold, near)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: KeyLayout,
    scale: float,
    kind: Isa | None = None,
) -> torch.Tensor:  # [T, Hq, D]
    """Attend with q [T, Hq, D] to k, v [N, Hkv, D], which may be views with contiguous heads.

    Keys and values in FP8 are converted to bfloat16 as they are read. Results of rows that are not
    in `layout` are undefined. kind: the instructions to use. By default, the best that this machine
    supports.
    """
    kind = kind or best_isa()
    assert kind is not None and runs(q.dtype, q.shape[2]) and scale > 0
    assert k.dtype == v.dtype and k.dtype in KV_DTYPES
    out = torch.empty(q.shape, dtype=q.dtype)
    if not len(layout.table):
        return out
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    group, chunks = heads // kv_heads, len(layout.rows) // CHUNK
    assert group % layout.fold == 0 and layout.fold <= QUERY_BLOCK
    widths = (-(-dim // 32) * 32, -(-dim // 16) * 16)
    near = layout.independent and group == layout.fold
    at_once = max(1, min(kv_heads, PACKED_VALUES // (chunks * CHUNK * max(widths))))
    at_once, packed = (kv_heads, 0) if near else (at_once, at_once * chunks * CHUNK)
    keys, values = (_aligned(packed * width) for width in widths)
    fields = {
        "group": group,
        "fold": layout.fold,
        "chunks": chunks,
        "own": int(near),
        "page": 0,
        "factor": _factor(scale),
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "rows": layout.rows.data_ptr(),
        "pages": 0,
        "table": layout.table.data_ptr(),
        "nothing": ZEROS.data_ptr(),
        "tiles": tile_setting().data_ptr(),
    }
    sides = {"q": q, "k": k, "v": v, "out": out}
    for name, tensor in sides.items():
        assert tensor.stride(2) == 1
        row, head = (stride * tensor.itemsize for stride in tensor.stride()[:2])
        fields[f"{name}_row"], fields[f"{name}_head"] = row, head
    code = functions(dim, kind, k.dtype)
    for first in range(0, kv_heads, at_once):
        count = min(at_once, kv_heads - first)
        for name, tensor in sides.items():
            begin = first if name in ("k", "v") else first * group
            fields[name] = tensor.data_ptr() + begin * fields[f"{name}_head"]
        if not near:
            _run(code["pack"], fields, count, chunks)
        _run(code["attend"], fields, count * group // layout.fold, len(layout.table))
    return out


def paged_blocks(
    rows: Sequence[tuple[int, int, int, int]], group: int
) -> torch.Tensor:  # [blocks, BLOCK_FIELDS] int64
    """Return the table for sequences with few tokens each, whose keys are stored in KV pages.

    rows: (first row, number of rows, index of the first page in the flattened page table, number
        of keys) of each sequence. Its rows are the last keys.
    group: the number of query heads per key head.
    """
    step = max(1, QUERY_BLOCK // group)
    blocks = [
        (first + start, min(step, count - start), page, keys, keys - count + start + 1)
        for first, count, page, keys in rows
        for start in range(0, count, step)
    ]
    return torch.from_numpy(np.array(blocks, np.int64))


def attend_pages(
    q: torch.Tensor, cache: PagedCache, table: torch.Tensor, rows: PagedRows, scale: float
) -> torch.Tensor:  # [T, Hq, D]
    """Attend causally with q [T, Hq, D], a few tokens of each sequence, to keys and values in KV
    pages.

    Results are bit-identical to the results of `attend`.

    table: the result of `paged_blocks` for these rows.
    """
    count, heads, dim = q.shape
    kv_heads, kind = cache.keys.shape[1], best_isa()
    assert kind is not None and runs(q.dtype, dim) and q.stride(2) == 1
    out, group, width = torch.empty((count, heads, dim), dtype=BF16), heads // kv_heads, 2 * dim
    kv_dtype, key = cache.keys.dtype, dim * cache.keys.itemsize
    assert cache.keys.is_contiguous() and cache.values.is_contiguous() and group <= QUERY_BLOCK
    assert kv_dtype in KV_DTYPES
    call = Call(
        0,
        kv_heads,
        group,
        group,
        len(table),
        0,
        1,
        rows.page_size,
        _factor(scale),
        2 * q.stride(0),
        2 * q.stride(1),
        *(kv_heads * key, key) * 2,
        heads * width,
        width,
        q.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        out.data_ptr(),
        0,
        0,
        0,
        rows.page_table.data_ptr(),
        table.data_ptr(),
        ZEROS.data_ptr(),
        tile_setting().data_ptr(),
    )
    blocks = kv_heads * len(table)
    few = (
        blocks * dim * QUERY_BLOCK < SHARED_VALUES
    )  # an estimate, since the sequences' lengths are not read here
    run_on_threads(functions(dim, kind, kv_dtype)["attend"], call, 1 if few else blocks)
    return out


@cache
def _factor(scale: float) -> int:
    """Return the float32 bits of the factor that converts a score to an exponent of 2."""
    return int(struct.unpack("<i", struct.pack("<f", scale * math.log2(math.e)))[0])


def _run(function: Function, fields: Mapping[str, int], heads: int, blocks: int) -> None:
    values = {**fields, "next": 0, "heads": heads, "blocks": blocks}
    call = Call(*(values[field] for field in FIELDS))
    run_on_threads(function, call, heads * blocks)


def _aligned(values: int) -> torch.Tensor:
    memory = torch.empty(values + 32, dtype=BF16)
    return memory[-memory.data_ptr() % 64 // 2 :][:values]
