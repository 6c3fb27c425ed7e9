"""Machine code for products of 4- and 8-bit matrices on x86 processors with AVX512-VNNI: LLVM makes
it from `vnni_code.py` when it is first asked for (`machine_code.py`).

Owns how they are called. Leaves tensors to `vnni_layout.py`. Needs llvmlite, which the extra `cpu`
brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec

from saccade.kernels.processor import has_vnni
from saccade.kernels.x86.amx import has_amx
from saccade.kernels.x86.jit_cache import run_on_threads
from saccade.kernels.x86.machine_code import Function, compiled
from saccade.kernels.x86.vnni_call import FIELDS, TILED, Call


def runs_vnni() -> bool:
    """Return True if this processor has the instructions, and LLVM is there to use them."""
    return has_vnni() and find_spec("llvmlite") is not None


@cache
def function(name: str) -> Function:
    """Return the function with this name (`vnni_call.py`).

    Only what a model calls is made, the first time on a machine, then read from disk.
    """
    pair = "product_8", TILED  # warm-up has too few rows for AMX: a prompt would wait for it
    together = name in pair and has_amx("amx-int8")
    return _functions(pair if together else (name,))[name]


@cache
def _functions(names: Sequence[str]) -> Mapping[str, Function]:
    return compiled(names, "vnni_code", ("vnni_call", "llvm"), names)


def run(name: str, call: Mapping[str, int], pieces: int) -> None:
    """Do all the work that `call` describes, in `pieces`, on as many threads as PyTorch has.

    call: FIELDS without `next`; those that it leaves out are 0.
    """
    said = Call(0, *(call.get(field, 0) for field in FIELDS[1:]))
    run_on_threads(function(name), said, pieces)
