"""The sizes that kernels of `delta.py` and their callers agree on. Owns no code."""

from __future__ import annotations

CHANNELS = 256
"""Channels of one item of a convolution's kernel."""
COLUMNS = 32
"""Columns of a state in one item of the delta rule: they fit into a core's L1 cache."""
NO_LINE = -1
"""The line of a row whose state is stored nowhere else."""
