"""Pictures to embeddings: reads pixels from the arena, runs the vision tower on all of a step's pictures in one packed forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from saccade.core.arena import Arena
from saccade.core.plan import Encode
from saccade.core.types import ImageKey
from saccade.nn.protocol import FamilyNet


class VisionEncoder:
    """Encodes the pictures that plans name."""

    def __init__(self, net: FamilyNet, arena: Arena, device: torch.device) -> None:
        self._net = net
        self._arena = arena
        self._device = device

    def encode(self, encodes: Sequence[Encode]) -> Iterator[tuple[ImageKey, torch.Tensor]]:
        """Yields (key, embedding [num_tokens, embedding_width]); the arena slots may be freed once this is exhausted."""
        pixels = [torch.from_numpy(self._arena.view(encode.pixels)).to(self._device) for encode in encodes]  # uint8 [H, W, 3]
        yield from zip((encode.key for encode in encodes), self._net.encode(pixels))
