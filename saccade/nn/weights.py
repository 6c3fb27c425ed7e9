"""The interface through which layers load their tensors. `runtime/weights/checkpoint_weights.py`
implements it for files, and `runtime/weights/dummy.py` for random weights.

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
    """Loads the tensors of one checkpoint."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ops(self) -> Ops:
        """The kernels that the layers being built will use."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> Adapters:
        """The object that gives each layer being built its adapters."""
        ...

    def load(self, *parts: Part) -> torch.Tensor:
        """Load slices of tensors, and return them concatenated along the first dimension.

        The caller owns the result, which has the network's dtype and is on its device. Only these
        slices are read. Raises CheckpointError with the file and the tensor if one is missing or
        has the wrong shape.
        """
        ...

    def load_matrix(self, *parts: Part) -> Matrix:
        """Load slices as `load` does, and return them packed for matrix multiplication."""
        ...

    def load_experts(self, parts: Sequence[Part], turned: bool, /) -> Fp8Experts | None:
        """Load the matrices of experts in FP8, or return None if they are not kept in FP8.

        parts: tensors [experts, out, in], which are concatenated by outputs.
        turned: True if they are [experts, in, out].
        """
        ...

    def has(self, name: str, /) -> bool:
        """Return True if there is a tensor with this canonical name. For random weights this is
        always True.
        """
        ...

    def equals(self, part: Part, values: torch.Tensor, /) -> bool:
        """Return True if the stored slice equals `values`, in the form that `load` returns.

        It is always True for random weights. Raises CheckpointError if the tensor is missing or has
        another shape.
        """
        ...

    def fits(self, part: Part, /) -> bool:
        """Return True if the tensor has the shape of `part`. For random weights this is always
        True.
        """
        ...

    def matrix(self, weight: torch.Tensor, name: str, /) -> Matrix:
        """Return the packed form of a matrix [out, in], as `load_matrix` does.

        The matrix is the loaded tensor `name`, or a part of it.
        """
        ...

    def found(self, name: str, values: torch.Tensor, /) -> None:
        """Record that the network uses the tensor `name`, although it was read elsewhere.

        The tensor's values then count for the vision encoder's fingerprint.
        """
        ...
