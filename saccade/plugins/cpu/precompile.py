"""Compiles kernels in a background process on the first start on a machine, while the worker
compiles others, because a process compiles on one core only. The process runs
`python -m saccade.plugins.cpu.precompile` and does not import PyTorch.

Compiles kernels that most models need, with sizes that do not depend on the model. Starts with
those that a model uses last, since the worker compiles in the order of use.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from saccade.ipc.tied import start_tied
from saccade.plugins.cpu.disk_cache import file_name, is_cached, is_writable
from saccade.plugins.cpu.kernel_object import describe, object_file
from saccade.plugins.cpu.numba_call import GATE_VALUES

MODULE = "saccade.plugins.cpu.precompile"
"""The name of this module. `__name__` is "__main__" when it runs as a program."""
KERNELS: tuple[tuple[str, str, *tuple[int, ...]], ...] = (
    ("sample_code", "sample"),
    ("layer_code", "layer_norm", True),
    ("layer_code", "layer_norm", False),
    ("layer_code", "rope"),
    ("layer_code", "sigmoid_gate", GATE_VALUES),
    ("compiled_ops_code", "add_bf16"),
    ("compiled_ops_code", "negative"),
    ("compiled_ops_code", "concat_columns"),
    ("compiled_ops_code", "mul_f32"),
    ("compiled_ops_code", "gather", 4),
    ("compiled_ops_code", "gather", 1),
    ("layer_code", "gate", GATE_VALUES),
    ("paged_code", "decode_blocks"),
    ("layer_code", "add_rms_norm", True, 16),
    ("layer_code", "add_rms_norm", False, 16),
)


def find_missing() -> list[tuple[str, str, *tuple[int, ...]]]:
    """Return the kernels that are not cached, or an empty list if the cache cannot be written."""
    if not is_writable():
        return []
    return [kernel for kernel in KERNELS if not is_cached(file_name(describe(*kernel)))]


def start_background() -> Callable[[], None]:
    """Start the background process if kernels are missing. Returns a function that kills it.

    The process is also killed when the calling thread ends. It writes files atomically, so it can
    be killed at any time.
    """
    if not find_missing():
        return lambda: None
    # Errors are ignored: the worker compiles the same kernel later, and reports its error.
    quiet = subprocess.DEVNULL
    try:
        process = start_tied(MODULE, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:  # the process cannot be started: the worker compiles all kernels
        return lambda: None

    def end() -> None:
        process.kill()
        process.wait()

    return end


def main() -> None:
    """Compile the kernels that are not cached."""
    for kernel in find_missing():
        object_file(*kernel)


if __name__ == "__main__":
    main()
