"""The shape of a language model: a family reads it from a checkpoint, `nn/decoder.py` builds it.

Knows nothing of torch: what is said of a checkpoint without tensors uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `sections` are frequencies per axis (of Qwen-VL time, height, width), in
    blocks or interleaved. factor: positions are divided by it (linear scaling). pairs: as
    `kernels.reference.rotary.Pairs`.
    """

    theta: float
    sections: tuple[int, ...]
    interleaved: bool
    factor: float = 1.0
    pairs: Literal["halves", "neighbours"] = "halves"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts in place of MLPs in `layers`: `count` of `width` values, a row goes to `top`."""

    layers: frozenset[int]
    count: int
    top: int
    width: int


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over latents (`nn/latent.py`): of `latent` values per token each head makes its
    keys and values. `plain` values of a head's queries and keys stay as they are, `turned` are
    turned; its values are `values`. query_latent: of so many values queries are made; None: of the
    layer's input. eps: of the norms within.
    """

    latent: int
    plain: int
    turned: int
    values: int
    query_latent: int | None
    eps: float

    @property
    def width(self) -> int:
        """Values that the cache keeps of a token."""
        return self.latent + self.turned

    @property
    def query_factor(self) -> float:
        """Attention divides scores by the root of `width`, the model by that of a head's size."""
        return float((self.width / (self.plain + self.turned)) ** 0.5)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model. `experts` None: each layer has an MLP of its own."""

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
