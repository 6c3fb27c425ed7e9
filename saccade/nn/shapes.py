"""The shapes of language models and vision towers. Families read them from checkpoints;
`nn/decoder.py` and `nn/tower.py` build them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's long rope (arXiv 2309.00071).

    Frequencies that turn at least `fast` times within the `original` positions stay. Those with at
    most `slow` turns are divided by `factor`, and others are between.
    """

    factor: float
    original: float
    fast: float
    slow: float
    amplitude: float  # factor on the tables
    whole: bool  # the bounds are rounded outwards to whole frequencies

    def bounds(self, theta: float, dim: int) -> tuple[float, float]:
        """Find which of `dim / 2` frequencies changes first, and which is first divided in full."""

        def place(turns: float) -> float:
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = place(self.fast), place(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 * (low == high)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return how much larger scores' roots become with `factor` times as many positions.

    It is the paper's figure, weighed.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding."""

    theta: float
    # frequencies per axis (in Qwen-VL time, height, width), in blocks or interleaved
    sections: tuple[int, ...]
    interleaved: bool
    factor: float = 1.0  # positions are divided by it (linear scaling)
    pairs: Literal["halves", "neighbours"] = "halves"  # as `kernels.reference.rotary.Pairs`
    yarn: Yarn | None = None  # long rope, or `None`


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts in place of MLPs in `layers`: `count` with `width` values each. A row goes to
    `top`.
    """

    layers: frozenset[int]
    count: int
    top: int
    width: int


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over latents (`plugins/models/kit/latent.py`)."""

    latent: int  # values per token from which each head makes its keys and values
    plain: int  # values in a head's queries and keys that stay as they are
    rotated: int  # those that are turned
    values: int  # the size of a head's values
    # values from which queries are made, or `None` if from the layer's input
    query_latent: int | None
    eps: float  # for the norms within
    sharpness: float = 1.0  # scores are multiplied by it

    @property
    def width(self) -> int:
        """Return how many values the cache keeps per token."""
        return self.latent + self.rotated

    @property
    def query_factor(self) -> float:
        """Return the factor on queries.

        Attention divides scores by the root of `width`, the model by the root of a head's size.
        """
        return self.sharpness * float((self.width / (self.plain + self.rotated)) ** 0.5)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model. With `experts` None, each layer has an MLP of its own."""

    # sizes
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    # heads
    heads: int
    kv_heads: int
    head_dim: int
    # norms and positions
    rms_eps: float
    rope: RopeConfig
    context_length: int
    # variants
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    experts: ExpertsConfig | None = None


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
