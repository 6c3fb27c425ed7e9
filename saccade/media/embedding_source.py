"""The interface for requesting image embeddings from other servers, so that this server does not
decode and encode the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saccade.core.plan import PixelSlot
from saccade.core.types import ImageKey, Tower
from saccade.media.opened import OpenedImage


@dataclass(frozen=True, slots=True)
class EncoderOutcome:
    """The result of requesting an embedding, and the time it took."""

    outcome: str  # "embedding", or the kind of failure
    ms: float = 0.0  # duration of the request, including `encode_ms`
    encode_ms: float = 0.0  # duration in the encoder server's vision encoder


class EmbeddingSource(Protocol):
    """Requests the embeddings of images of requests in flight from other servers.

    If a request fails, this server encodes the image.
    """

    def trust(self, tower: Tower) -> None:
        """Accept only embeddings of the vision encoder `tower`. None are requested before this
        call.
        """

    def fits(self, num_tokens: int, slot: PixelSlot) -> bool:
        """Return True if embeddings can be requested and one of `num_tokens` tokens fits in the
        slot.
        """
        ...

    async def encode_image(self, opened: OpenedImage, slot: PixelSlot) -> EncoderOutcome:
        """Request an image's embedding, and write it into `slot`.

        The slot is not written after the call returns. Raises CancelledError after `call_off`.
        """
        ...

    def call_off(self, key: ImageKey) -> None:
        """Cancel the request for an image."""

    async def close(self) -> None:
        """Cancel every request, and close every connection."""
