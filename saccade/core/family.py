"""What the rest of Saccade asks of a model family on the CPU: the `FamilySpec` protocol and its
value types.

A spec answers from `config.json` and its neighbours alone: sizes, token counts, prompt expansion,
positions. No tensors, no torch. The tensor side is `nn.protocol.FamilyNet`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saccade.core.types import Grid, Image, Span


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a family turns a picture into patches.

    `min_pixels`, `max_pixels` bound height * width after resizing.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: str = "bicubic"
    temporal_patch: int = 2

    @property
    def factor(self) -> int:
        """Heights and widths after resizing are multiples of this many pixels."""
        return self.patch * self.merge

    def fingerprint(self, family: str) -> bytes:
        """16 bytes that differ whenever the pixels handed to the encoder may differ."""
        return hashlib.blake2b(repr((family, self)).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one token's key/value storage: `layers` x 2 x [kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int

    def on_rank(self, ranks: int) -> KVLayout:
        """What one of `ranks` ranks stores: its share of the heads; where there are fewer heads
        than ranks, one that others hold too.
        """
        return replace(self, kv_heads=max(1, self.kv_heads // ranks))


Divisible = tuple[tuple[int, str], ...]
"""Counts that must divide by the number of ranks, each with its name for people."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a model may be cut among ranks.

    `encoder_width`: the narrowest rows of the vision tower's matrices that are cut.
    """

    text: Divisible
    kv_heads: int
    encoder: Divisible
    encoder_width: int

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        """What keeps the language model from being cut among `ranks` ranks."""
        found = [f"{count} {what}" for count, what in self.text if count % ranks]
        if self.kv_heads % ranks and ranks % self.kv_heads:
            found.append(f"{self.kv_heads} key/value heads")
        return tuple(found)

    def encoder_obstacles(self, ranks: int) -> tuple[str, ...]:
        """What keeps the vision tower from it."""
        return tuple(f"{count} {what}" for count, what in self.encoder if count % ranks)


class FamilySpec(Protocol):
    """CPU facts of one checkpoint."""

    @property
    def family(self) -> str:
        """For people and fingerprints, e.g. "qwen3_vl"."""
        ...

    @property
    def image_rules(self) -> ImageRules: ...

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def cuts(self) -> Cuts: ...

    @property
    def encoder_blocks(self) -> int:
        """Blocks of the vision tower, each of which computes every patch."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Largest position the model was made for, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def embedding_width(self) -> int:
        """Values per image token in an embedding: hidden size, times (1 + deepstack levels)."""
        ...

    def image_size(self, height: int, width: int, rules: ImageRules) -> tuple[int, int]:
        """(height, width) after resizing.

        Raises ImageError when the aspect ratio is beyond what the family allows.
        """
        ...

    def grid(self, height: int, width: int) -> Grid:
        """Patch grid of a resized picture."""
        ...

    def num_tokens(self, grid: Grid) -> int: ...

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image]
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Replace the k-th image placeholder token by as many as `images[k]` has tokens.

        Raises InvalidRequest when placeholders and images do not correspond.
        """
        ...

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Rotary positions [3, num_tokens] (time, height, width) of a picture's tokens, were it the
        first of a prompt.

        Computed anew at every call; who asks often keeps them.
        """
        ...

    def positions(
        self, num_tokens: int, spans: Sequence[Span], blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Rotary positions [3, num_tokens], and the position of the token that would come next.

        `blocks` are the `image_positions` of the pictures that spans name. Tokens after the last
        span advance all axes by one each.
        """
        ...
