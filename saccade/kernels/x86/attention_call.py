"""What the machine code for attention is called with, and the sizes that it and its callers agree
on. Owns no code.
"""

from __future__ import annotations

import ctypes

NAMES = ("pack", "attend")
QUERIES = 128
"""Rows of a piece of work: they share keys and values while a core's cache has them."""
ABREAST = 32
"""Rows that are multiplied at a time."""
KEYS = 512
"""Keys that are scored before their values are read."""
CHUNK = 64
"""Keys are padded to a multiple of so many."""
LONGEST_HEAD = 128
FIELDS = (
    "next",  # the first piece of work that nobody has taken: 0
    "heads",  # of queries, in folds; or of keys where these are packed
    "group",  # heads of queries that share one of keys
    "fold",  # so many of them stand side by side in the rows of a piece; a divisor of group
    "blocks",  # of rows; or how many chunks of keys there are
    "chunks",  # of keys, of one head
    "own",  # 1: a piece packs its own keys, KEYS at a time, in a core's cache; else 0
    "page",  # tokens of a page; 0: `rows` says where keys lie
    "factor",  # the bits of a float32: scores times it are exponents of 2
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
    "keys",  # packed: of each head, chunk, and 16 keys: [dim / 32] tiles of [pair, key, 2]
    "values",  # packed: of each head, chunk, and 32 keys: [dim / 16] tiles of [pair, dim, 2]
    "rows",  # int64 [chunks, CHUNK]: where each key lies in k and v; -1 where there is none
    "pages",  # int32: the page table
    "table",  # int64 [blocks, 5], BLOCK says of what
    "nothing",  # zeros, as many as a head has
    "tiles",  # how AMX's tiles are configured
)
"""What a function is called with: 64-bit integers, from `q` on addresses."""
POINTERS = frozenset(FIELDS[FIELDS.index("q") :])
BLOCK = ("first", "count", "chunk", "keys", "seen")
"""Of a piece: its first row, how many (each is there for every head of the fold), the first chunk
of its keys, how many keys, and how many of them the first row sees (the next one more, and so on).
On pages, `chunk` is the place of its first page in the page table.
"""
Call = ctypes.c_int64 * len(FIELDS)
