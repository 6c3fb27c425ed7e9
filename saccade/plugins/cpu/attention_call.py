"""Arguments and block sizes shared by the attention kernels and their callers."""

from __future__ import annotations

import ctypes

NAMES = ("pack", "attend")
QUERY_BLOCK = 128
"""Query rows of a work block. They share the keys and values in a core's cache."""
ROW_TILE = 32
"""Number of query rows per matmul."""
KEY_BLOCK = 512
"""Number of keys that are scored before their values are read."""
CHUNK = 64
"""The number of keys is padded to a multiple of this."""
MAX_HEAD = 128
FIELDS = (
    "next",  # the counter of claimed blocks: 0
    "heads",  # attend: number of query heads / fold; pack: number of key heads
    "group",  # number of query heads per key head
    "fold",  # query heads interleaved in a block's rows; a divisor of group
    "blocks",  # attend: number of row blocks; pack: number of chunks of keys
    "chunks",  # number of chunks of keys in a head
    "own",  # 1: a block packs its own keys, KEY_BLOCK at a time, in a core's cache; else 0
    "page",  # tokens per KV page; 0: `rows` has the keys' indices
    "factor",  # float32 bits: scores are multiplied by it and used as exponents of 2
    "q_row",  # bytes from one row to the next
    "q_head",
    "k_row",
    "k_head",
    "v_row",
    "v_head",
    "out_row",
    "out_head",
    "q",
    "k",
    "v",
    "out",
    "keys",  # packed [head, chunk, 16 keys, dim / 32] tiles of [pair, key, 2]
    "values",  # packed [head, chunk, 32 keys, dim / 16] tiles of [pair, dim, 2]
    "rows",  # int64 [chunks, CHUNK]: each key's index in k and v, -1 for padding
    "pages",  # int32: the page table
    "table",  # int64 [blocks, BLOCK_FIELDS]
    "nothing",  # zeros, one head's worth
    "tiles",  # AMX tile configuration
)
"""The arguments of a function. All are 64-bit integers. Those from `q` on are addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("q") :])
BLOCK_FIELDS = ("first", "count", "chunk", "keys", "seen")
"""The fields that describe a block: its first row, the number of rows (each stands for `fold`
heads), the first chunk of keys, the number of keys, and how many of them the first row attends to.
Each further row attends to one more key. With KV pages, `chunk` is the index of the first page in
the page table.
"""
Call = ctypes.c_int64 * len(FIELDS)
