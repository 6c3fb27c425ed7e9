"""Describes how a tensor of a checkpoint is created from tensors of a GGUF file.

The changes reverse those of llama.cpp's converter. Families' `gguf.py` have the names, and
`plugins/gguf/tensors.py` reads the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.plugins.gguf.header import GgufFile, TensorInfo

Edit = Literal["none", "less one", "decay", "colours last"]
"""How values are changed.

less one: subtract one.
decay: compute log(-x). colours last: convert a patch's pixels [out, 3, height, width] to rows in
which the three colors of a pixel are adjacent.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The order of parts of a tensor that llama.cpp stores in a different order.

    A run has `each` groups of `keys` parts with `size` values. transformers stores the parts with
    the same index contiguously, and llama.cpp the parts of one group.
    """

    axis: int  # the axis with `runs` runs, from index `start`
    start: int
    keys: int
    each: int
    size: int
    runs: int = 1
    rest: int = 0  # the number of values after each run, which are not moved


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the checkpoint, which has `shape`. Its sources are concatenated, then edited.

    join: the axis of concatenation. With None, the sources are stacked along a new third axis.
    """

    sources: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    join: int | None = 0
    edit: Edit = "none"
    heads: Heads | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that its sources take in the file."""
        return sum(source.nbytes for source in self.sources)


def one(tensor: TensorInfo, edit: Edit = "none", heads: Heads | None = None) -> Made:
    """Return a tensor that is created from one source."""
    return Made((tensor,), tensor.shape, 0, edit, heads)


def patch_matrix(tensor: TensorInfo) -> Made:
    """Return a patch embedding as a matrix [out, height * width * 3], in which the three colors
    of a pixel are adjacent.
    """
    shape = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return Made((tensor,), shape, 0, "colours last")


def from_pairs(heads: int, size: int) -> Heads:
    """Return the order that converts llama.cpp's pairs (2i, 2i + 1) within a head to pairs (i, i +
    size / 2).
    """
    return Heads(0, 0, 2, size // 2, 1, heads)


def from_halves(heads: int, size: int, turned: int) -> Heads:
    """Return the order that converts halves, as in llama.cpp, to pairs in the first `turned` values
    of each head.
    """
    return Heads(0, 0, turned // 2, 2, 1, heads, size - turned)


def two_frames(file: GgufFile, tensor: TensorInfo) -> Made:
    """Return a patch embedding for two frames, which is two tensors in the file. Raises
    CheckpointError.
    """
    frames = tensor, sibling(file, tensor, f"{tensor.name}.1")
    return Made(frames, (*tensor.shape[:2], 2, *tensor.shape[2:]), None)


def gates_and_ups(file: GgufFile, gates: TensorInfo) -> Made:
    """Return the first matrices of experts, whose gate and up projections are two tensors in the
    file.

    Raises CheckpointError.
    """
    ups = sibling(file, gates, gates.name.replace("ffn_gate_exps", "ffn_up_exps"))
    if len(gates.shape) != 3:
        raise file.refuse(
            f"tensor {gates.name} must have one matrix per expert, but is {list(gates.shape)}"
        )
    count, rows, columns = gates.shape
    return Made((gates, ups), (count, 2 * rows, columns), 1)


def layer_count(file: GgufFile) -> int:
    """Return the number of layers, without MTP layers. Raises CheckpointError."""
    arch = file.architecture
    names = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    found = [file.metadata.get(name, 0) for name in names]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise file.refuse(f"{names[0]} is {found[0]!r}, and {names[1]} is {found[1]!r}")
    return int(found[0] - found[1])


def sibling(file: GgufFile, tensor: TensorInfo, name: str) -> TensorInfo:
    """Return the tensor `name`, which is joined with `tensor` and must have the same shape.

    Raises CheckpointError.
    """
    found = file.tensors.get(name)
    if found is None:
        raise file.refuse(
            f"it has no tensor {name}, which belongs to {tensor.name}: the file is incomplete (for "
            "a split model, use llama-gguf-split --merge)"
        )
    if found.shape != tensor.shape:
        raise CheckpointError(
            f"{file.path}: tensor {name} is {list(found.shape)}, but {tensor.name} is "
            f"{list(tensor.shape)}"
        )
    return found
