"""A compiled kernel (`kernel_object.py`), and how machine code that is made on this machine runs on
PyTorch's own threads. A second pool of threads would fight for the processor with the first.

Such code deals its work out itself (an atomic counter), so that any count of threads may run it. A
kernel's instructions are in a separate file, `*_code.py`, next to its caller's.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from saccade.plugins.cpu import machine_code
from saccade.plugins.cpu.kernel_object import object_file

SHARED_VALUES = 1 << 15
"""Work on fewer values is not worth waking another thread for."""


class CallListener(Protocol):
    """Called for each kernel that runs while it is in `LISTENERS`."""

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


class Kernel:
    """A compiled `body(block)`.

    block: int64 numbers. The first is the next unclaimed item (`claim`), the second how many items
    there are. Then follows what the caller gives: addresses, counts, `bits` of real numbers.
    """

    def __init__(self, code: str, name: str, *sizes: int) -> None:
        """Compile the kernel, or take it from disk, as `object_file` does."""
        self.function = machine_code.link(object_file(code, name, *sizes), (name,))[name]

    def __call__(self, items: int, values: int, *numbers: int) -> None:
        """Do all `items`, which read and write about `values` values, with as many threads as torch
        has.
        """
        block = (ctypes.c_int64 * (2 + len(numbers)))(0, items, *numbers)
        run_on_threads(self.function, block, items if values >= SHARED_VALUES else 1)


def bits_of(value: float) -> int:
    """Return the bits of `value` in float32, from which `real` makes it again."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


bits = cache(bits_of)
"""As `bits_of`, and remembered: a model has few values."""
