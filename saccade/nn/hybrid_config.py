"""The shape of a language model of two kinds of layers, beyond `TextConfig`: a family reads it from
a checkpoint, `nn/hybrid.py` builds it.

Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta rule's heads, over all ranks: each of queries and keys serves
    `value_heads / key_heads` neighbouring ones of values. taps: inputs of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Values of all keys of a token, or of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """What the language model has beyond `TextConfig`. full: which layers have full attention; the
    others have the delta rule. rotary_dim: values of a head, its first ones, that are turned.
    shared: values of the expert that all rows go to besides; 0 where layers have no experts.
    drafting: layers of the head that drafts; 0: none that is known here.
    """

    full: tuple[bool, ...]
    delta: DeltaConfig
    rotary_dim: int
    shared: int
    drafting: int = 0
