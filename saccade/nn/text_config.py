"""A language model's shape. A family reads it from a checkpoint, and `nn/decoder.py` builds it.

Knows nothing about torch: what is said about a checkpoint without tensors uses it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's long rope (arXiv 2309.00071).

    Frequencies that turn at least `fast` times within the `original` positions stay. Those with at
    most `slow` turns are divided by `factor`, and others are between. amplitude: factor on the
    tables. whole: the bounds are rounded outwards to whole frequencies.
    """

    factor: float
    original: float
    fast: float
    slow: float
    amplitude: float
    whole: bool

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
    """Rotary embedding.

    sections: frequencies per axis (in Qwen-VL time, height, width), in blocks or interleaved.
    factor: positions are divided by it (linear scaling). pairs: as
    `kernels.reference.rotary.Pairs`. yarn: long rope, or `None`.
    """

    theta: float
    sections: tuple[int, ...]
    interleaved: bool
    factor: float = 1.0
    pairs: Literal["halves", "neighbours"] = "halves"
    yarn: Yarn | None = None


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
    """Attention over latents (`nn/latent.py`).

    latent: values per token from which each head makes its keys and values. plain: values in a
    head's queries and keys that stay as they are. rotated: those that are turned. values: the size
    of a head's values. query_latent: values from which queries are made, or `None` if from the
    layer's input. eps: for the norms within. sharpness: scores are multiplied by it.
    """

    latent: int
    plain: int
    rotated: int
    values: int
    query_latent: int | None
    eps: float
    sharpness: float = 1.0

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
