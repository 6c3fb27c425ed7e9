"""The sizes that the kernel of `draw.py` and its caller agree on. Owns no code."""

from __future__ import annotations

UNDECIDED = -1
"""Stands for a token where rounding could decide, or where too many are likely."""
BLOCK = 64
"""Tokens that are passed over together where all are unlikely."""
