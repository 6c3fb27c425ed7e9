"""Sizes of language models and vision encoders. Families read them from checkpoints, and
`nn/decoder.py` and `nn/tower.py` build the networks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's scaling of RoPE to long contexts (arXiv 2309.00071).

    Frequencies with at least `fast` rotations over the `original` positions are unchanged. Those
    with at most `slow` rotations are divided by `factor`. Between the two, both are interpolated.
    """

    factor: float
    original: float  # the context length before scaling
    fast: float
    slow: float
    amplitude: float  # the cos and sin tables are multiplied by it
    whole: bool  # round the bounds outwards to integers

    def bounds(self, theta: float, dim: int) -> tuple[float, float]:
        """Return which of the `dim / 2` frequencies change.

        The result is the index of the first frequency that changes, and of the first one that is
        divided by `factor`.
        """

        def place(turns: float) -> float:
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = place(self.fast), place(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 * (low == high)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor (mscale) for a context that is `factor` times as long.

    weight: the factor that a checkpoint's configuration calls `mscale`.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of rotary position embedding (RoPE)."""

    theta: float
    # number of frequencies per axis (in Qwen-VL time, height, width); the axes' frequencies are
    # contiguous, or interleaved
    sections: tuple[int, ...]
    interleaved: bool
    factor: float = 1.0  # positions are divided by it (linear scaling)
    pairs: Literal["halves", "neighbours"] = "halves"  # `kernels.reference.rotary.Pairs`
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sizes of mixture-of-experts MLPs, which replace the MLPs of `layers`."""

    layers: frozenset[int]
    count: int  # experts per layer
    top: int  # experts per token
    width: int  # intermediate size of each expert


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of multi-head latent attention, MLA (`plugins/models/kit/latent.py`)."""

    latent: int  # latent values per token, from which each head computes its keys and values
    plain: int  # values of a head's queries and keys without RoPE
    rotated: int  # values of a head's queries and keys with RoPE
    values: int  # size of a head's values
    # latent values per token from which queries are computed; `None`: from the layer's input
    query_latent: int | None
    eps: float  # epsilon of the norms
    sharpness: float = 1.0  # attention scores are multiplied by it

    @property
    def width(self) -> int:
        """The number of values that the cache stores per token."""
        return self.latent + self.rotated

    @property
    def query_factor(self) -> float:
        """The factor by which queries are multiplied.

        The kernel divides scores by sqrt(`width`), while the model divides them by the square root
        of the head size.
        """
        return self.sharpness * float((self.width / (self.plain + self.rotated)) ** 0.5)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The sizes of a language model. If `experts` is None, each layer has its own MLP."""

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
"""Mean and standard deviation of red, green and blue (0 to 1) for normalizing pixels."""


@dataclass(frozen=True, slots=True)
class BlocksConfig:
    """The sizes of the blocks of a vision encoder."""

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
    """The sizes of a vision encoder for images of any size, and of its merger.

    merge x merge neighboring patches become one token with `out_hidden` values.
    """

    patch: int
    merge: int
    out_hidden: int


@dataclass(frozen=True, slots=True)
class TileConfig(BlocksConfig):
    """The sizes of a vision encoder for tiles of `side` x `side` pixels, and of its connector.

    Pixels at a tile's right and bottom edges that do not fill a patch are ignored. merge x merge
    neighboring patches become one token with `out_hidden` values.
    """

    side: int
    patch: int
    merge: int
    out_hidden: int

    @property
    def across(self) -> int:
        """The number of patches along a tile's edge."""
        return self.side // self.patch

    @property
    def covered(self) -> int:
        """The number of pixels along a tile's edge that patches cover."""
        return self.across * self.patch

    @property
    def patches(self) -> int:
        """The number of patches per tile."""
        return self.across**2

    @property
    def rows(self) -> int:
        """The number of rows per tile that the blocks compute."""
        return self.patches

    @property
    def tokens(self) -> int:
        """The number of tokens per tile."""
        return self.patches // self.merge**2


@dataclass(frozen=True, slots=True)
class SiglipConfig(TileConfig):
    """The sizes of a SigLIP vision encoder."""

    # Checkpoint files store QKV as one matrix, and the learned positions with a batch dimension, as
    # timm does.
    fused: bool = False
