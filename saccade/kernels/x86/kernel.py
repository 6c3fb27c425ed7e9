"""A kernel that Numba has compiled (`kernel_object.py`), and how it is called.

Its instructions stand in a file of their own, `*_code.py`, beside its caller's.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

from saccade.kernels.x86 import machine_code
from saccade.kernels.x86.jit_cache import SHARED_VALUES, run_on_threads
from saccade.kernels.x86.kernel_object import object_file


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
