"""Random weights that implement `nn.weights.Weights`, for runs in which only the model's shapes
matter. No weight file is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from saccade.kernels.matrix import Matrix
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.ops import Ops
from saccade.nn.low_rank import Adapters
from saccade.nn.weights import Part
from saccade.runtime.weights.quant_policy import AS_STORED, QuantPolicy
from saccade.runtime.weights.stored import in_memory


class DummyWeights:
    """Generates random weights, which depend only on the tensor's name.

    They are scaled so that activations stay finite. Weights of norms are 1.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        policy: QuantPolicy = AS_STORED,
        ops: Ops | None = None,
    ) -> None:
        self.ops = ops or pick_ops(device, dtype)
        self.adapters = Adapters()
        self.dtype = dtype
        self.device = device
        self._policy = policy

    def load_matrix(self, *parts: Part) -> Matrix:
        return self._policy.make(self.load(*parts), parts, self.ops)

    def load_experts(self, _parts: Sequence[Part], _turned: bool, /) -> None:
        return None

    def has(self, _name: str, /) -> bool:
        return True

    def equals(self, _part: Part, _values: torch.Tensor, /) -> bool:
        return True

    def fits(self, _part: Part, /) -> bool:
        return True

    def found(self, _name: str, _values: torch.Tensor, /) -> None: ...

    def matrix(self, weight: torch.Tensor, name: str) -> Matrix:
        return self._policy.make(weight, [Part(name, tuple(weight.shape))], self.ops)

    def load(self, *parts: Part) -> torch.Tensor:
        with in_memory(parts):
            made = [self.make(part.name, part.shape)[part.index] for part in parts]
            return torch.cat(made).to(self.dtype)

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return all values of the tensor `name`."""
        if not shape:  # a bound of activations
            return torch.full((1,), -math.inf if name.endswith("min") else math.inf)
        if len(shape) == 1:
            return (
                torch.zeros(shape, device=self.device)
                if name.endswith("bias")
                else torch.ones(shape, device=self.device)
            )
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        seed = int.from_bytes(digest, "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        # A tensor with all experts is [E, in, out].
        inputs = shape[1] if len(shape) == 3 else math.prod(shape[1:])
        return torch.randn(shape, generator=generator, device=self.device) / math.sqrt(inputs)
