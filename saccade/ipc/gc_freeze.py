"""Garbage collection in processes that live long and may not pause."""

from __future__ import annotations

import gc


def settle() -> None:
    """Exclude all current objects from future garbage collections.

    They live as long as the process. A collection over them takes fifty milliseconds and more, and
    in a forking process copies pages that are otherwise unchanged.
    """
    gc.collect()
    gc.freeze()
