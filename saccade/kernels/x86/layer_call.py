"""The size that kernels of `layer.py` and their callers agree on. Owns no code."""

from __future__ import annotations

GATE_VALUES = 4096
"""Values that one item of a gate's kernel makes."""
