"""Shapes of vision towers: families read them from checkpoints, `nn/tower.py` builds their blocks.

Knows nothing about torch.
"""

from __future__ import annotations

from dataclasses import dataclass

Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of red, green and blue, of 0 to 1, by which pixels are normalised."""


@dataclass(frozen=True, slots=True)
class BlocksConfig:
    """A tower's blocks."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    activation: str
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class MergedConfig(BlocksConfig):
    """A tower that sees images of any sizes, and the merger behind it.

    merge x merge neighbouring patches become one token with `out_hidden` values.
    """

    patch: int
    merge: int
    out_hidden: int


@dataclass(frozen=True, slots=True)
class TileConfig(BlocksConfig):
    """A tower that sees one tile of `side` x `side` pixels at a time, and the connector behind it.

    Pixels at a tile's far edges are left out where they fill no whole patch. merge x merge
    neighbouring patches become one token with `out_hidden` values.
    """

    side: int
    patch: int
    merge: int
    out_hidden: int

    @property
    def across(self) -> int:
        """Return the patches along a tile's edge."""
        return self.side // self.patch

    @property
    def covered(self) -> int:
        """Return the pixels along a tile's edge that its patches cover."""
        return self.across * self.patch

    @property
    def patches(self) -> int:
        """Return the patches per tile."""
        return self.across**2

    @property
    def rows(self) -> int:
        """Return the rows per tile that the blocks compute."""
        return self.patches

    @property
    def tokens(self) -> int:
        """Return the tokens per tile."""
        return self.patches // self.merge**2


@dataclass(frozen=True, slots=True)
class SiglipConfig(TileConfig):
    """SigLIP.

    fused: files have a block's queries, keys and values as one matrix, and one image's learned
    positions, as timm has them.
    """

    fused: bool = False
