"""The size that the kernel for tokens that decode, and its caller, agree on. Owns no code."""

from __future__ import annotations

BLOCK_KEYS = 128
"""Keys that are scored before their values are read: what is between stays in a core's cache."""
