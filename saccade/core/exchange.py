"""What a server of role language says to an encoder, and hears: the words of `ENCODE_PATH`.

    POST  `EmbeddingWanted` as JSON in a header; body: the encoded picture, or nothing, where the
          encoder may know the image by its key
    200   `EmbeddingGiven` as JSON in a header; body: its values, row by row
    404   it does not know the image: send the bytes
    409   its vision tower, or what it makes of the settings, is another

Knows nothing of connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.types import Image, Tower

ENCODE_PATH = "/internal/embedding"
WANTED_HEADER = "x-saccade-image"
GIVEN_HEADER = "x-saccade-embedding"


@dataclass(frozen=True, slots=True)
class EmbeddingWanted:
    """The embedding of `image`, as `tower` makes it. What follows are the request's wishes for its
    size, from which the encoder finds its settings again.
    """

    image: Image
    tower: Tower
    detail: Literal["auto", "low", "high", "original"] = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingGiven:
    """The embedding that follows. blake3: of its bytes, hexadecimal. encode_ms: what the tower took
    for this request; 0.0 where it was found.
    """

    tower: Tower
    num_tokens: int
    blake3: str
    encode_ms: float = 0.0
