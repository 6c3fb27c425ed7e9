"""A process that compiles kernels beside the model's, on a machine's first start: one process
compiles on one core. Knows which models need them, not what they are (`kernels/x86/ahead.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

from saccade.core.options import usable_cores
from saccade.ipc.tied import tied
from saccade.kernels.ops import pick_ops
from saccade.kernels.x86 import ahead


def begin_compiling(
    place: torch.device, dtype: torch.dtype, rank: int, ranks: int
) -> Callable[[], None]:
    """Start the process beside the first rank, if kernels are missing that a model there needs, and
    the ranks leave a core. Returns what ends it.

    It ends with the calling thread, too. Its files are whole or absent, whenever that is.
    """
    compiles = rank == 0 and pick_ops(place, dtype).kind == "x86" and usable_cores() > ranks
    if not compiles or not ahead.find_missing():
        return lambda: None
    command = tied([sys.executable, "-m", ahead.__name__])
    # What it cannot compile, the worker compiles again, and says why not.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end() -> None:
        process.kill()
        process.wait()

    return end
