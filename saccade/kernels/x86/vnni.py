"""Machine code for products of 4- and 8-bit matrices on x86 processors with AVX512-VNNI: LLVM makes
it from `vnni_code.py` when it is first asked for (`machine_code.py`).

Owns how they are called. Leaves tensors to `vnni_layout.py`. Needs llvmlite, which the extra `cpu`
brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec

from saccade.kernels.processor import has_vnni
from saccade.kernels.x86.amx import has_amx
from saccade.kernels.x86.jit_cache import run_on_threads
from saccade.kernels.x86.machine_code import Function, compiled, source_text
from saccade.kernels.x86.vnni_call import FIELDS, NAMES, TILED, Call


def runs_vnni() -> bool:
    """Return True if this processor has the instructions, and LLVM is there to use them."""
    return has_vnni() and find_spec("llvmlite") is not None


@cache
def functions() -> Mapping[str, Function]:
    """Return the functions by name (`vnni_call.NAMES`).

    With AMX there is product_8_tiled too. Made once a process: about a second the first time on a
    machine, then read from disk.
    """
    tiled = has_amx("amx-int8")
    names = (*NAMES, *([TILED] if tiled else []))

    def assembly(triple: str) -> str:
        from saccade.kernels.x86 import vnni_code  # brings llvmlite, which only compiling needs

        return vnni_code.assembly(triple, tiled=tiled)

    sources = map(source_text, ("vnni", "vnni_call", "llvm", "vnni_code"))
    return compiled(names, assembly, "\n".join((*names, *sources)))


def run(name: str, call: Mapping[str, int], pieces: int) -> None:
    """Do all the work that `call` describes, in `pieces`, on as many threads as PyTorch has.

    call: FIELDS without `next`; those that it leaves out are 0.
    """
    said = Call(0, *(call.get(field, 0) for field in FIELDS[1:]))
    run_on_threads(functions()[name], said, pieces)
