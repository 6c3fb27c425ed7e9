"""Compiles kernels before a model asks for them, in a process beside the model's on a machine's
first start: one process compiles on one core. `python -m saccade.plugins.cpu.precompile`, without
PyTorch.

Knows kernels that most models need, whose sizes are the same for all. A model's process begins with
the first that it needs, so the last come first here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from saccade.ipc.tied import start_tied
from saccade.plugins.cpu.disk_cache import file_name, is_cached, is_writable
from saccade.plugins.cpu.kernel_object import describe, object_file
from saccade.plugins.cpu.numba_call import GATE_VALUES

MODULE = "saccade.plugins.cpu.precompile"
"""This file, also where it is the program."""
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
    """Return the kernels that are not cached, or none if caching is disabled."""
    if not is_writable():
        return []
    return [kernel for kernel in KERNELS if not is_cached(file_name(describe(*kernel)))]


def start_background() -> Callable[[], None]:
    """Start the process if kernels are missing. Returns what ends it.

    It ends with the calling thread, too. Its files are whole or absent, whenever that is.
    """
    if not find_missing():
        return lambda: None
    # The worker compiles again what failed here, and reports the error.
    quiet = subprocess.DEVNULL
    try:
        process = start_tied(MODULE, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:  # no process may be added here: the worker compiles all
        return lambda: None

    def end() -> None:
        process.kill()
        process.wait()

    return end


def main() -> None:
    """Compile what is missing."""
    for kernel in find_missing():
        object_file(*kernel)


if __name__ == "__main__":
    main()
