"""The request and response of `ENCODE_PATH`, between a server with role language and an encoder.

POST  `EmbeddingRequest` as JSON in a header. Body: the encoded image, or the concatenated images of
      a video's frames, or empty if the encoder may have cached the embedding
200   `EmbeddingResult` as JSON in a header. Body: the embedding's values, row by row
404   the encoder does not have the image: send its bytes
409   the encoder's weights differ, or it derives different settings from the request
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
    """A request for the embedding of `image` by the vision encoder `tower`.

    The other fields are from the client's request. The encoder derives the preprocessing settings
    from them.
    """

    image: Image
    tower: Tower
    detail: Literal["auto", "low", "high", "original"] = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    # for a video whose frames were sent as images: the fields that determine the frames' size
    frames: FrameBudget | None = None
    nbytes: tuple[int, ...] = ()  # size of each image in the body


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The header that an encoder sends before an embedding's bytes."""

    tower: Tower
    num_tokens: int
    blake3: str  # hexadecimal digest of the embedding's bytes
    encode_ms: float = 0.0  # time that the vision encoder took for this request; 0.0: cached
