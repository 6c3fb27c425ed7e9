"""The sizes of a language model with full and linear attention, in addition to `TextConfig`.
Families read them from checkpoints, and `hybrid_decoder.py` builds the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Numbers and sizes of the heads of gated delta rule layers, over all ranks.

    Each query and key head serves `value_heads / key_heads` consecutive value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # kernel size of the convolution

    @property
    def keys(self) -> int:
        """The total number of values in a token's keys over all heads. Its queries have the same
        number.
        """
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The sizes of a hybrid language model that `TextConfig` does not contain."""

    full: tuple[bool, ...]  # for each layer: True: full attention; False: the gated delta rule
    delta: DeltaConfig
    rotary_dim: int  # RoPE rotates the first `rotary_dim` values of a head
    shared: int  # intermediate size of the shared expert, or 0 without experts
    drafting: int = 0  # number of layers of the MTP head; 0: not determined here
