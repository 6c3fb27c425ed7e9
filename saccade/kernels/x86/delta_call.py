"""The sizes that kernels of `delta.py` and their callers agree on. Owns no code."""

from __future__ import annotations

CHANNELS = 256
"""Channels that one item of a convolution's kernel makes."""
COLUMNS = 32
"""Of a state, in one item of the delta rule: they stay in a core's first cache."""
NO_LINE = -1
"""Where a row's state is kept nowhere else."""
