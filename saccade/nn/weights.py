"""The source of a network's tensors, as its layers see it. `runtime/weights/checkpoint_weights.py`
implements it for files and for random numbers.

Layers ask for tensors in the form needed, so a network is whole as soon as built.
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
        """Return the kernels for the layers being built."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> Adapters:
        """Return the adapters' additions to products in the layers being built."""
        ...

    def load(self, *parts: Part) -> torch.Tensor:
        """Load the parts one below another (along the first dimension).

        The result is owned, in the network's dtype, on its device. Only the wanted slices are read.
        Raises CheckpointError naming file and tensor for a missing or misshapen tensor.
        """
        ...

    def load_matrix(self, *parts: Part) -> Matrix:
        """Load the parts as `load` does, in their final form for products."""
        ...

    def load_experts(self, parts: Sequence[Part], turned: bool, /) -> Fp8Experts | None:
        """Load tensors [experts, out, in] as matrices for products, if they stay in FP8.

        They are stacked by outputs. turned: the tensors are [experts, in, out]. Returns
        `None` if `load` is to make them whole.
        """
        ...

    def has(self, name: str, /) -> bool:
        """Return True for a tensor's canonical name. Random weights have any."""
        ...

    def equals(self, part: Part, values: torch.Tensor, /) -> bool:
        """Return True if the stored tensor's wanted slice has these values. Random weights do.

        values: as `load` would return them. Raises CheckpointError as `load` does.
        """
        ...

    def fits(self, part: Part, /) -> bool:
        """Return True for a tensor with the given shape. Random weights have any."""
        ...

    def matrix(self, weight: torch.Tensor, name: str, /) -> Matrix:
        """Return a matrix [out, in] cut from the loaded tensor `name`, or the whole tensor.

        It has the form that `load_matrix` gives.
        """
        ...

    def found(self, name: str, values: torch.Tensor, /) -> None:
        """Record that the network has the tensor `name`, read by others.

        The tower's fingerprint needs it.
        """
        ...
