"""Creates object files of kernels. Numba compiles a kernel once per machine. Later processes load
it from disk without Numba, whose import and first use take most of a second.

Does not import PyTorch. The code of a kernel is in a separate file, `*_code.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from saccade.plugins.cpu import disk_cache, machine_code

Body = Callable[[Any], None]


def object_file(code: str, name: str, *sizes: int) -> bytes:
    """Return a kernel's object file from disk, or compile it.

    code: a module of this package.
    name: the function in it that returns the kernel's body.
    sizes: the arguments of this function.
    """

    def make() -> bytes:
        from saccade.plugins.cpu.jit import compile_body

        instructions = import_module(f"{__package__}.{code}")
        return compile_body(name, vars(instructions)[name](*sizes))

    return disk_cache.get_or_create(describe(code, name, *sizes), make)


def describe(code: str, name: str, *sizes: int) -> str:
    """Return the cache key of a kernel's object file, which identifies all inputs of the
    compilation.
    """
    return "\n".join((code, name, repr(sizes), machine_code.describe_target(), _sources()))


@cache
def _sources() -> str:
    """Return the part of the key that all kernels share: Numba's version and settings, and the
    source of all kernels.
    """
    folder = Path(__file__).parent
    agreed = (*folder.glob("*_call.py"), *folder.glob("*_code.py"))
    files = (folder / "jit.py", *sorted(agreed))
    told = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith("NUMBA_"))
    return "\n".join((version("numba"), *told, *(file.read_text() for file in files)))
