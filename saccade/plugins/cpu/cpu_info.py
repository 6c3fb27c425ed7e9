"""CPU features from /proc/cpuinfo: for compiled code that is cached on disk, and for
processes without PyTorch and LLVM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
"""What decides which code a processor gets."""
MAX_BYTES = 1 << 14
"""One processor takes less. Linux asks each core for its speed as its lines are read."""


@cache
def first_processor() -> Mapping[str, str]:
    """Return the fields of the first processor, or none where they cannot be read."""
    try:
        with Path("/proc/cpuinfo").open("rb", buffering=0) as file:
            text = os.read(file.fileno(), MAX_BYTES).decode(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@cache
def flags() -> frozenset[str]:
    """Return the instructions that this process may use, as Linux calls them."""
    return frozenset(first_processor().get("flags", "").split())


def describe() -> str:
    """Return words that differ between processors that need other code."""
    return "\n".join(f"{name}: {first_processor().get(name, '')}" for name in IDENTITY)
