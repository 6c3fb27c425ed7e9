"""A checkpoint's tensor, and what of a GGUF file it is made of.

The changes are those by llama.cpp's converter, undone. Leaves names to `gguf.py` in the families'
folders, and bytes to `plugins/gguf/tensors.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.plugins.gguf.header import GgufFile, TensorInfo

Edit = Literal["none", "less one", "decay", "colours last"]
"""What is done to the values: none; one is taken off; they become log(-x); a patch's pixels
[out, 3, height, width] become rows, the three colours of a pixel side by side.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Parts of a tensor in llama.cpp's own order.

    A run has `each` groups with `keys` parts of `size` values. In transformers the parts with one
    index are contiguous, in llama.cpp those of one group.
    """

    axis: int  # the tensor's, with `runs` runs from `start` on
    start: int
    keys: int
    each: int
    size: int
    runs: int = 1
    rest: int = 0  # values behind each run, in their place


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor in the checkpoint, with `shape`: its sources, joined, then edited.

    join: the dimension. None: a new one, the third, with a slice for each.
    """

    sources: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    join: int | None = 0
    edit: Edit = "none"
    heads: Heads | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(source.nbytes for source in self.sources)


def one(tensor: TensorInfo, edit: Edit = "none", heads: Heads | None = None) -> Made:
    """Return a tensor of one source."""
    return Made((tensor,), tensor.shape, 0, edit, heads)


def patch_matrix(tensor: TensorInfo) -> Made:
    """Return a patch embedding whose rows have a pixel's colours side by side."""
    shape = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return Made((tensor,), shape, 0, "colours last")


def from_pairs(heads: int, size: int) -> Heads:
    """Return the order of heads that have two halves, and pairs in llama.cpp."""
    return Heads(0, 0, 2, size // 2, 1, heads)


def from_halves(heads: int, size: int, turned: int) -> Heads:
    """Return the order of heads that begin with `turned` values in pairs: llama.cpp's halves."""
    return Heads(0, 0, turned // 2, 2, 1, heads, size - turned)


def two_frames(file: GgufFile, tensor: TensorInfo) -> Made:
    """Return a patch embedding of two frames, each with a tensor. Raises CheckpointError."""
    frames = tensor, sibling(file, tensor, f"{tensor.name}.1")
    return Made(frames, (*tensor.shape[:2], 2, *tensor.shape[2:]), None)


def gates_and_ups(file: GgufFile, gates: TensorInfo) -> Made:
    """Return experts' first matrices, whose gates and ups are two tensors.

    Raises CheckpointError.
    """
    ups = sibling(file, gates, gates.name.replace("ffn_gate_exps", "ffn_up_exps"))
    if len(gates.shape) != 3:
        raise file.refuse(f"tensor {gates.name} is {list(gates.shape)}, no matrix for each expert")
    count, rows, columns = gates.shape
    return Made((gates, ups), (count, 2 * rows, columns), 1)


def layer_count(file: GgufFile) -> int:
    """Count the language model's layers, without drafting layers. Raises CheckpointError."""
    arch = file.architecture
    names = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    found = [file.metadata.get(name, 0) for name in names]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise file.refuse(f"{names[0]} is {found[0]!r}, of which {found[1]!r} draft")
    return int(found[0] - found[1])


def sibling(file: GgufFile, tensor: TensorInfo, name: str) -> TensorInfo:
    """Return the second tensor to join with `tensor`, in the same shape. Raises CheckpointError."""
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
