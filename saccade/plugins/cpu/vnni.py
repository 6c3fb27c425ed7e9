"""Runs int4 and int8 GEMM kernels on x86 CPUs with AVX512-VNNI. LLVM compiles them from
`vnni_code.py` at first use (`machine_code.py`).

Needs llvmlite, which the extra `cpu` installs. `vnni_layout.py` handles tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from saccade.plugins.cpu.amx import has_amx
from saccade.plugins.cpu.kernel import run_on_threads
from saccade.plugins.cpu.machine_code import Function, compiled
from saccade.plugins.cpu.vnni_call import FIELDS, TILED, Call

DEPENDENCIES = (
    *("saccade.kernels.reference.int8", "saccade.kernels.reference.hadamard"),
    *("vnni_call", "llvm"),
)
"""Modules that the code of the kernels depends on. If their source changes, the kernels are
compiled again.
"""


@cache
def function(name: str) -> Function:
    """Return a function with a name from `vnni_call.py`. It is compiled at first use and cached on
    disk.
    """
    # Compile both together: the warm-up batch is too small for AMX, so without this, the first
    # prompt would wait for the compiler.
    pair = (
        "product_8",
        TILED,
    )
    together = name in pair and has_amx("amx-int8")
    return _functions(pair if together else (name,))[name]


@cache
def _functions(names: Sequence[str]) -> Mapping[str, Function]:
    return compiled(names, "vnni_code", DEPENDENCIES, names)


def run(name: str, call: Mapping[str, int], blocks: int) -> None:
    """Run a function on PyTorch's threads.

    call: its arguments by name in FIELDS, except `next`. Missing arguments are 0.
    blocks: the number of work blocks.
    """
    values = Call(0, *(call.get(field, 0) for field in FIELDS[1:]))
    run_on_threads(function(name), values, blocks)
