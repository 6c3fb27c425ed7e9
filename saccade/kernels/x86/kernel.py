"""A kernel that Numba compiles for this machine's processor once, and that later processes take
from disk without Numba, whose import and first use take most of a second.

Knows how a kernel is called and kept. Its instructions stand in a file of their own, `*_code.py`,
beside its caller's.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from saccade.kernels.x86 import kept_files, machine_code
from saccade.kernels.x86.jit_cache import SHARED_VALUES, run_on_threads

Body = Callable[[Any], None]


class Kernel:
    """A compiled `body(block)`.

    block: int64 numbers. The first is the next unclaimed item (`claim`), the second how many items
    there are. Then follows what the caller gives: addresses, counts, `bits` of real numbers.
    """

    def __init__(self, code: Callable[[], ModuleType], name: str, *sizes: int) -> None:
        """Compile the body that the function `name` of `code()` returns for `sizes`, or take it
        from disk.
        """

        def make() -> bytes:
            from saccade.kernels.x86.jit import compile_body

            return compile_body(name, vars(code())[name](*sizes))

        body = code.__module__, name, repr(sizes)
        words = "\n".join((*body, machine_code.describe_target(), _sources()))
        self.function = machine_code.link(kept_files.kept(words, make), (name,))[name]

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


@cache
def _sources() -> str:
    """Return what all kernels' code follows from, beside their names and the processor."""
    folder = Path(__file__).parent
    agreed = (*folder.glob("*_call.py"), *folder.glob("*_code.py"))
    files = (folder / "jit.py", *sorted(agreed))
    told = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith("NUMBA_"))
    return "\n".join((version("numba"), *told, *(file.read_text() for file in files)))
