"""Runs compiled kernels (`kernel_object.py`) on PyTorch's own threads, because a second thread pool
would compete with it for the cores.

The threads of a kernel claim work items from a shared atomic counter, so any number of threads may
run it. The code of a kernel is in a separate file, `*_code.py`, next to the file that calls it.
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
"""Minimum number of values for using more than one thread. For less work, waking a thread takes
longer than it saves.
"""


class CallListener(Protocol):
    """A function in `LISTENERS`, which is called after each run of a kernel."""

    def ran(self, function: Any, call: ctypes.Array[ctypes.c_int64], threads: int, /) -> None: ...


LISTENERS: list[CallListener] = []


def run_on_threads(function: Any, call: ctypes.Array[ctypes.c_int64], pieces: int) -> None:
    """Run `function` on PyTorch's threads, but on no more than `pieces` of them.

    function: a ctypes function that takes the address of `call`.
    call: its arguments. The first one is the counter of claimed work items, and is changed.
    pieces: the number of work items.
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
    """Return GOMP_parallel(function, argument, threads, flags) of PyTorch's OpenMP library.

    Returns `None` if the library has another interface. The symbol is looked up through PyTorch's
    library, because a process may have loaded several copies of OpenMP.
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
    """A compiled `body(block)`, which can be called.

    block: an int64 array. [0] is the next unclaimed item (`jit.next_item`), and [1] the number of
    items. The caller's arguments follow: addresses, counts, and the `bits` of floats.
    """

    def __init__(self, code: str, name: str, *sizes: int) -> None:
        """Load the kernel from disk, or compile it. The arguments are the same as for
        `object_file`.
        """
        self.function = machine_code.link(object_file(code, name, *sizes), (name,))[name]

    def __call__(self, items: int, values: int, *numbers: int) -> None:
        """Run the kernel on PyTorch's threads.

        items: the number of work items.
        values: about how many values they read and write in total; below `SHARED_VALUES`, one
            thread does all the work.
        numbers: the arguments after the first two.
        """
        block = (ctypes.c_int64 * (2 + len(numbers)))(0, items, *numbers)
        run_on_threads(self.function, block, items if values >= SHARED_VALUES else 1)


def bits_of(value: float) -> int:
    """Return the float32 bits of `value`, which `jit.bits_to_f32` converts back."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


bits = cache(bits_of)
"""`bits_of` with a cache, for constants such as an epsilon, of which a model has few."""
