"""The shape of a language model with two kinds of layers, beyond `TextConfig`. A family reads it
from a checkpoint, and `nn/hybrid.py` builds it.

Knows nothing about torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta rule's heads, over all ranks.

    Each head of queries and keys serves `value_heads / key_heads` neighbouring heads of values.
    taps: inputs of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Return the number of values in all keys of a token, or in all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """What the language model has beyond `TextConfig`.

    full: which layers have full attention. The others have the delta rule. rotary_dim: how many of
    a head's values, its first ones, are turned. shared: values of the expert that all rows go to
    besides, or 0 where layers have no experts. drafting: layers of the MTP head, or 0 where none is
    known here.
    """

    full: tuple[bool, ...]
    delta: DeltaConfig
    rotary_dim: int
    shared: int
    drafting: int = 0
