"""The source of tensors from which layers are built. `runtime/weights/checkpoint_weights.py`
implements it for files and for random weights.

Layers request tensors in their final form, so a network is ready as soon as it is constructed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from saccade.kernels.matrix import Fp8Experts, Matrix
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import Adapters
from saccade.nn.part import Part as Part


class Weights(Protocol):
    """One checkpoint's tensors."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ops(self) -> Ops:
        """The kernels for the layers being built."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> Adapters:
        """The adapters of the layers being built."""
        ...

    def load(self, *parts: Part) -> torch.Tensor:
        """Load slices of tensors, concatenated along the first dimension.

        The result is owned by the caller, in the network's dtype, on its device. Only these slices
        are read. Raises CheckpointError with file and tensor if one is missing or has the wrong
        shape.
        """
        ...

    def load_matrix(self, *parts: Part) -> Matrix:
        """Load slices as `load` does, in the packed form for matrix multiplication."""
        ...

    def load_experts(self, parts: Sequence[Part], turned: bool, /) -> Fp8Experts | None:
        """Load the matrices of experts, or return `None` unless they stay in FP8.

        parts: tensors [experts, out, in], concatenated by outputs. turned: they are [experts, in,
        out].
        """
        ...

    def has(self, name: str, /) -> bool:
        """Return True if there is a tensor with this canonical name. Random weights have all."""
        ...

    def equals(self, part: Part, values: torch.Tensor, /) -> bool:
        """Return True if the stored slice equals `values`, in the form that `load` returns.

        It is always True for random weights. Raises CheckpointError if the tensor is missing or has
        another shape.
        """
        ...

    def fits(self, part: Part, /) -> bool:
        """Return True if a tensor has this shape. It is always True for random weights."""
        ...

    def matrix(self, weight: torch.Tensor, name: str, /) -> Matrix:
        """Return the packed form of a matrix [out, in], as `load_matrix` does.

        The matrix is the loaded tensor `name`, or a part of it.
        """
        ...

    def found(self, name: str, values: torch.Tensor, /) -> None:
        """Record that the network contains the tensor `name`, although it was read elsewhere.

        It is part of the vision encoder's fingerprint.
        """
        ...
