"""Reads CPU features from /proc/cpuinfo, for the cache keys of compiled code, and for processes
without PyTorch and LLVM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
"""The fields that determine which code a CPU needs."""
MAX_BYTES = 1 << 14
"""Maximum bytes to read, which exceeds the entry of one CPU. Reading the whole file is slow,
because Linux then queries the speed of each core.
"""


@cache
def first_processor() -> Mapping[str, str]:
    """Return the fields of the first CPU, or an empty mapping if they cannot be read."""
    try:
        with Path("/proc/cpuinfo").open("rb", buffering=0) as file:
            text = os.read(file.fileno(), MAX_BYTES).decode(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@cache
def flags() -> frozenset[str]:
    """Return the instruction set extensions that the CPU supports, with Linux's names."""
    return frozenset(first_processor().get("flags", "").split())


def describe() -> str:
    """Return a string that differs between CPUs that need different code."""
    return "\n".join(f"{name}: {first_processor().get(name, '')}" for name in IDENTITY)
