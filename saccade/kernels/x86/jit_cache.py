"""Machine code that is made on this machine: where it is kept, and how it runs on PyTorch's own
threads. A second pool of threads would fight for the processor with the first.

Owns the folder with that code. Such code deals its work out itself (an atomic counter), so that any
count of threads may run it.
"""

from __future__ import annotations

import ctypes
import os
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


def code_folder(name: str) -> Path | None:
    """Return the folder `name` for this user's code, made if need be.

    Returns `None` if the folder cannot be kept, or others could put their code there.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "saccade" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # a user without a home, too
        return None
    safe = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if safe and os.access(folder, os.W_OK) else None
