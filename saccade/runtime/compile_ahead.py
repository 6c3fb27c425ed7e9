"""A process that compiles kernels beside the model's, on a machine's first start: one process
compiles on one core. Knows which models need them, not what they are (`kernels/x86/ahead.py`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import torch

from saccade.core.options import usable_cores
from saccade.ipc.tied import start_tied
from saccade.kernels.ops import pick_ops
from saccade.kernels.x86 import ahead


def begin_compiling(
    place: torch.device, dtype: torch.dtype, rank: int, ranks: int
) -> Callable[[], None]:
    """Start the process beside rank 0 if kernels are missing and a core is left. Returns what ends
    it.

    It ends with the calling thread, too. Its files are whole or absent, whenever that is.
    """
    compiles = rank == 0 and pick_ops(place, dtype).kind == "x86" and usable_cores() > ranks
    if not compiles or not ahead.find_missing():
        return lambda: None
    # What it cannot compile, the worker compiles again, and says why not.
    quiet = subprocess.DEVNULL
    try:
        process = start_tied(ahead.__name__, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:  # no process may be added here: the worker compiles all
        return lambda: None

    def end() -> None:
        process.kill()
        process.wait()

    return end
