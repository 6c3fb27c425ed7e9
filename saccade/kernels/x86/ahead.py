"""Compiles kernels before a model asks for them, where it has another core to do so:
`python -m saccade.kernels.x86.ahead`, without PyTorch.

Knows kernels that most models need, whose sizes are the same for all. A model's process begins with
the first that it needs, so the last come first here.
"""

from __future__ import annotations

from saccade.kernels.x86.kept_files import name_of, there, usable
from saccade.kernels.x86.kernel_object import describe, object_file
from saccade.kernels.x86.layer_call import GATE_VALUES

KERNELS: tuple[tuple[str, str, *tuple[int, ...]], ...] = (
    ("draw_code", "draw"),
    ("layer_code", "layer_norm", True),
    ("layer_code", "layer_norm", False),
    ("layer_code", "turn"),
    ("layer_code", "sigmoid_gate", GATE_VALUES),
    ("twins_code", "add_halves"),
    ("twins_code", "negative"),
    ("twins_code", "place_beside"),
    ("twins_code", "times_reals"),
    ("twins_code", "gather", 4),
    ("twins_code", "gather", 1),
    ("layer_code", "gate", GATE_VALUES),
    ("paged_code", "lay_out_singles"),
    ("layer_code", "add_rms_norm", True, 16),
    ("layer_code", "add_rms_norm", False, 16),
)


def find_missing() -> list[tuple[str, str, *tuple[int, ...]]]:
    """Return the kernels that are not kept. Returns none where nothing can be."""
    if not usable():
        return []
    return [kernel for kernel in KERNELS if not there(name_of(describe(*kernel)))]


def main() -> None:
    """Compile what is missing."""
    for kernel in find_missing():
        object_file(*kernel)


if __name__ == "__main__":
    main()
