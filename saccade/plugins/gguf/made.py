"""Describes how a checkpoint's tensor is made from those of a GGUF file, by undoing the changes
that llama.cpp's converter made.

Tensor names are in `gguf.py` in the families' folders, and `tensors.py` reads the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.plugins.gguf.header import GgufFile, TensorInfo

Edit = Literal["none", "less one", "decay", "colours last"]
"""How to change the values. less one: subtract 1. decay: log(-x). colours last: flatten patches
[out, 3, height, width] to rows, where the three colours of a pixel are adjacent.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Describes a tensor whose values llama.cpp stores in another order than transformers.

    A run has `each` groups of `keys` parts of `size` values. In llama.cpp, the parts of a group are
    contiguous. In transformers, those with the same index in their groups are.
    """

    axis: int  # axis of the tensor along which values are reordered
    start: int  # index on the axis of the first run
    keys: int
    each: int
    size: int
    runs: int = 1  # number of runs
    rest: int = 0  # number of values after each run that stay in place


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the checkpoint, which is made by joining its sources and editing the result."""

    sources: tuple[TensorInfo, ...]
    shape: tuple[int, ...]  # of the result
    join: int | None = 0  # dimension to concatenate; None: stack along a new third dimension
    edit: Edit = "none"
    heads: Heads | None = None

    @property
    def nbytes(self) -> int:
        """The size of the sources in the file, in bytes."""
        return sum(source.nbytes for source in self.sources)


def one(tensor: TensorInfo, edit: Edit = "none", heads: Heads | None = None) -> Made:
    """Return a tensor with a single source."""
    return Made((tensor,), tensor.shape, 0, edit, heads)


def patch_matrix(tensor: TensorInfo) -> Made:
    """Return a patch embedding as a matrix in which the colours of a pixel are adjacent."""
    shape = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return Made((tensor,), shape, 0, "colours last")


def from_pairs(heads: int, size: int) -> Heads:
    """Return the order of heads whose RoPE pairs are halves, but adjacent values in llama.cpp."""
    return Heads(0, 0, 2, size // 2, 1, heads)


def from_halves(heads: int, size: int, turned: int) -> Heads:
    """Return the order of heads whose first `turned` values are adjacent RoPE pairs, but halves in
    llama.cpp.
    """
    return Heads(0, 0, turned // 2, 2, 1, heads, size - turned)


def two_frames(file: GgufFile, tensor: TensorInfo) -> Made:
    """Return a patch embedding of two frames, which the file stores as two tensors. Raises
    CheckpointError.
    """
    frames = tensor, sibling(file, tensor, f"{tensor.name}.1")
    return Made(frames, (*tensor.shape[:2], 2, *tensor.shape[2:]), None)


def gates_and_ups(file: GgufFile, gates: TensorInfo) -> Made:
    """Return the joined gate and up projections of experts, which the file stores as two tensors.

    Raises CheckpointError.
    """
    ups = sibling(file, gates, gates.name.replace("ffn_gate_exps", "ffn_up_exps"))
    if len(gates.shape) != 3:
        raise file.refuse(f"tensor {gates.name} is {list(gates.shape)}, no matrix for each expert")
    count, rows, columns = gates.shape
    return Made((gates, ups), (count, 2 * rows, columns), 1)


def layer_count(file: GgufFile) -> int:
    """Return the language model's number of layers, without MTP layers. Raises CheckpointError."""
    arch = file.architecture
    names = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    found = [file.metadata.get(name, 0) for name in names]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise file.refuse(f"{names[0]} is {found[0]!r}, of which {found[1]!r} draft")
    return int(found[0] - found[1])


def sibling(file: GgufFile, tensor: TensorInfo, name: str) -> TensorInfo:
    """Return the tensor `name`, which must have the shape of `tensor`. Raises CheckpointError."""
    found = file.tensors.get(name)
    if found is None:
        raise file.refuse(
            f"no tensor {name}, which belongs to {tensor.name}: the file is not complete (of a "
            "split model: llama-gguf-split --merge)"
        )
    if found.shape != tensor.shape:
        raise CheckpointError(
            f"{file.path}: tensor {name} is {list(found.shape)}, but {tensor.name} "
            f"{list(tensor.shape)}"
        )
    return found
