"""The socket for embeddings from elsewhere, of images that are then not decoded or encoded here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey, Tower
from saccade.media.opened import OpenedImage


@dataclass(frozen=True, slots=True)
class EncoderOutcome:
    """The end of a question. `outcome` is "embedding", or the reason for failure. `ms` is the whole
    time, including `encode_ms` in the encoder's tower.
    """

    outcome: str
    ms: float = 0.0
    encode_ms: float = 0.0


class EmbeddingSource(Protocol):
    """Gives embeddings of held images. After any failure this server encodes the image itself."""

    def trust(self, tower: Tower) -> None:
        """Take only embeddings made by this tower. Nothing is asked before."""

    def fits(self, num_tokens: int, slot: PixelSlot) -> bool:
        """Return True if an embedding may be asked for and fits the slot."""
        ...

    async def encode_image(self, opened: OpenedImage, slot: PixelSlot) -> EncoderOutcome:
        """Have a held image's embedding written into `slot`. Writes end with the call.

        Raises CancelledError after `call_off`.
        """
        ...

    def call_off(self, key: ImageKey) -> None:
        """Cancel the question for an image."""

    async def close(self) -> None:
        """End every question and every connection."""
