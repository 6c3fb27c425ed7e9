"""A SigLIP tower's shape: a family reads it from a checkpoint, `nn/siglip.py` builds it.

Knows nothing about torch.
"""

from __future__ import annotations

from dataclasses import dataclass

Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of red, green and blue, of 0 to 1, by which pixels are normalised."""


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """SigLIP, which sees one tile of `side` x `side` pixels at a time, and the connector behind it.

    merge x merge neighbouring patches become one token. fused: files have a block's queries, keys
    and values as one matrix, and one image's learned positions, as timm has them.
    """

    depth: int
    hidden: int
    heads: int
    intermediate: int
    activation: str
    norm_eps: float
    side: int
    patch: int
    merge: int
    out_hidden: int
    fused: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def across(self) -> int:
        """Return the patches along a tile's edge."""
        return self.side // self.patch

    @property
    def patches(self) -> int:
        """Return the patches per tile."""
        return self.across**2

    @property
    def tokens(self) -> int:
        """Return the tokens per tile."""
        return self.patches // self.merge**2
