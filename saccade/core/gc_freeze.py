"""Garbage collection in processes that live long and may not pause."""

from __future__ import annotations

import gc


def settle() -> None:
    """Leave what is here now out of all collections to come, for it stays to the end of the
    process: looking through it, or through what a library brings, takes fifty milliseconds and
    more, and in a process that forks it makes copies of pages that nobody has changed.
    """
    gc.collect()
    gc.freeze()
