"""Request and response of `ENCODE_PATH`, between a server of role language and an encoder.

POST  `EmbeddingRequest` as JSON in a header; body: the encoded image, or the frames' one after
      another, or empty if the encoder may have cached the image's key
200   `EmbeddingResult` as JSON in a header; body: its values, row by row
404   it does not know the image: send the bytes
409   its vision tower, or what it makes of the settings, is another
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.types import Image, Tower
from saccade.core.video import FrameBudget

ENCODE_PATH = "/internal/embedding"
REQUEST_HEADER = "x-saccade-image"
RESULT_HEADER = "x-saccade-embedding"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for the embedding of `image`, made by `tower`.

    The remaining fields are the request's size wishes, from which the encoder derives the settings.
    frames: what decides frame sizes, for a video whose frames came as images. nbytes: the file size
    of each image in the body.
    """

    image: Image
    tower: Tower
    detail: Literal["auto", "low", "high", "original"] = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    frames: FrameBudget | None = None
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """An embedding's header.

    blake3: hexadecimal digest of its bytes. encode_ms: the tower's time for this request; 0.0 for a
    cache hit.
    """

    tower: Tower
    num_tokens: int
    blake3: str
    encode_ms: float = 0.0
