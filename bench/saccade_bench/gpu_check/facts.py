"""Stage `facts`: describe the machine in the log, and in facts.json for the report.

It also imports torch first, so that other stages do not wait for a cold disk.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments

COMMANDS = (
    ("nvidia-smi",),
    ("df", "-h", "/tmp"),
    ("free", "-g"),
    ("which", "gcc", "nvcc", "ncu", "compute-sanitizer"),
)


def card() -> dict[str, Any]:
    """Return the properties of the GPU that torch reports."""
    import torch

    found: dict[str, Any] = {"cuda": torch.cuda.is_available(), "cuda version": torch.version.cuda}
    if found["cuda"]:
        seen = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": seen.name,
            "gpus": torch.cuda.device_count(),
            "gpu memory": seen.total_memory,
            "compute capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": seen.multi_processor_count,
        }
    return found


def triton_key() -> dict[str, Any]:
    """Return a hash of Triton's part of its cache keys. A cache made elsewhere can be reused if it
    is the same.
    """
    if not find_spec("triton"):
        return {}
    from triton.runtime import cache

    return {"triton key": hashlib.sha256(cache.triton_key().encode()).hexdigest()}


def main() -> int:
    args = stage_arguments(__doc__)
    file, path = FigureFile(args.figures), args.figures.with_name("facts.json")
    for command in COMMANDS:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, timeout=10, check=False)
    began = time.monotonic()
    found: dict[str, Any] = {}
    looks: tuple[Callable[[], dict[str, Any]], ...] = (card, triton_key)
    for look in looks:

        def add(look: Callable[[], dict[str, Any]] = look) -> None:
            found.update(look())

        file.attempt(look.__name__.replace("_", " "), add, optional=look is triton_key)
        path.write_text(json.dumps(found) + "\n")
    print(json.dumps(found, indent=1), flush=True)
    file.add(Figure("first import of torch", time.monotonic() - began, "s"))
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
