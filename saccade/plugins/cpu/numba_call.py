"""Sizes shared by the kernels that Numba compiles and their callers."""

from __future__ import annotations

GATE_VALUES = 4096
"""Output values per work item of a gate kernel (`layer.py`)."""
BLOCK_KEYS = 128
"""Keys that are scored before their values are read, so that scores stay in cache (`paged.py`)."""
CHANNELS = 256
"""Channels per work item of the convolution kernel (`delta.py`)."""
COLUMNS = 32
"""Columns of a state per work item of the delta rule, which fit in L1 (`delta.py`)."""
NO_SLOT = -1
"""The snapshot slot of a row whose state is not saved (`delta.py`)."""
UNDECIDED = -1
"""Returned instead of a token if rounding could change the token, or if too many tokens are likely
(`sample.py`).
"""
BLOCK_TOKENS = 64
"""Tokens that are skipped together if all of them are unlikely (`sample.py`)."""
