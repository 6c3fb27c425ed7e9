"""The shape of a language model with two kinds of layers, beyond `TextConfig`. A family reads it
from a checkpoint, and `hybrid_decoder.py` builds it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta rule's heads, over all ranks.

    Each head of queries and keys serves `value_heads / key_heads` neighbouring heads of values.
    taps: how many inputs the convolution has.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Return how many values a token's keys have together. Its queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """What the language model has beyond `TextConfig`."""

    full: tuple[bool, ...]  # which layers have full attention. The others have the delta rule.
    delta: DeltaConfig
    rotary_dim: int  # how many values per head, its first ones, are turned
    shared: int  # values in the expert that all rows go to besides, or 0 without experts
    drafting: int = 0  # the MTP head's layers, or 0 if unknown here
