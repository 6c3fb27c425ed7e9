"""How machine code that is made on this machine runs on PyTorch's own threads. A second pool of
threads would fight for the processor with the first.

Such code deals its work out itself (an atomic counter), so that any count of threads may run it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

SHARED_VALUES = 1 << 15
"""Work on fewer values is not worth waking another thread for."""


class CallListener(Protocol):
    """Hears of all machine code that runs while it stands in `LISTENERS`."""

    def ran(self, function: Any, call: ctypes.Array[ctypes.c_int64], threads: int, /) -> None: ...


LISTENERS: list[CallListener] = []


def run_on_threads(function: Any, call: ctypes.Array[ctypes.c_int64], pieces: int) -> None:
    """Run function(call's address) on as many threads as PyTorch has, at most one for each piece.

    function: a ctypes function. call: its numbers, the first of which it changes.
    """
    threads = min(torch.get_num_threads(), pieces)
    if threads > 1 and (begin := parallel()) is not None:
        begin(function, ctypes.addressof(call), threads, 0)
    else:
        threads = 1
        function(ctypes.addressof(call))
    for listener in LISTENERS:
        listener.ran(function, call, threads)


@cache
def parallel() -> Any:
    """Return GOMP_parallel(function, argument, threads, flags) from PyTorch's own OpenMP.

    Returns `None` if that has another interface. PyTorch's own library is asked: it knows which
    among several copies it was linked with.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    return found
