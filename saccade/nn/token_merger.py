"""Behind a tower: neighbouring patches become the language model's row by a plain MLP."""

from __future__ import annotations

import torch

from saccade.nn.linear import Column, Linear, RowLinear
from saccade.nn.norm import LayerNorm
from saccade.nn.weights import Weights
from saccade.parallel import Shard


class TokenMerger:
    """Normalises patches, and maps a token's merge x merge of them to one row."""

    __slots__ = ("down", "norm", "unit", "up")

    def __init__(
        self,
        weights: Weights,
        names: tuple[str, str, str],
        sizes: tuple[int, int, int],
        eps: float,
        shard: Shard,
    ) -> None:
        """Load the merger.

        names: the norm's and the two projections'. sizes: values per patch, patches along a token's
        edge, values per token.
        """
        (norm, up, down), (hidden, merge, out) = names, sizes
        self.unit = merge**2
        merged = hidden * self.unit
        self.norm = LayerNorm(weights, norm, hidden, eps)
        columns = [Column(up, merged, shard)]
        self.up = Linear.columns(weights, columns, merged, bias=True, activation="gelu")
        self.down = RowLinear(weights, down, merged, out, shard, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden] to [M, out]."""
        return self.down(self.up(self.norm(x).view(len(x) // self.unit, -1)))
