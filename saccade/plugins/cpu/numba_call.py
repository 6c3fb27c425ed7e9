"""The sizes that kernels which Numba compiles and their callers agree on. Owns no code."""

from __future__ import annotations

GATE_VALUES = 4096
"""Values that one item of a gate's kernel makes (`layer.py`)."""
BLOCK_KEYS = 128
"""Keys that are scored before their values are read: what is between stays in a core's cache
(`paged.py`).
"""
CHANNELS = 256
"""Channels of one item of a convolution's kernel (`delta.py`)."""
COLUMNS = 32
"""Columns of a state in one item of the delta rule, which fit into a core's L1 cache (`delta.py`).
"""
NO_SLOT = -1
"""The line of a row whose state is stored nowhere else (`delta.py`)."""
UNDECIDED = -1
"""Stands for a token where rounding could decide, or where too many are likely (`sample.py`)."""
BLOCK_TOKENS = 64
"""Tokens that are passed over together where all are unlikely (`sample.py`)."""
