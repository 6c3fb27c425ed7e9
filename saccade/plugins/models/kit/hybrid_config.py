"""The shape of a language model with full and linear attention, in addition to `TextConfig`.
Families read it from checkpoints, and `hybrid_decoder.py` builds the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The heads of gated delta rule layers, over all ranks.

    Each query and key head serves `value_heads / key_heads` neighboring value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # kernel size of the convolution

    @property
    def keys(self) -> int:
        """Values of all keys of a token. Its queries have the same number."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The fields of a hybrid language model in addition to `TextConfig`."""

    full: tuple[bool, ...]  # for each layer: True: full attention; False: the gated delta rule
    delta: DeltaConfig
    rotary_dim: int  # RoPE rotates the first `rotary_dim` values of a head
    shared: int  # intermediate size of the shared expert, or 0 without experts
    drafting: int = 0  # number of layers of the MTP head; 0: not determined here
