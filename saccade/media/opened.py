"""Data classes for opened images and videos: hashes, sizes and sources. `media/media.py` and the
kinds of media create them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from saccade.core.recipe import Box, PageDrawing, PreprocessParams
from saccade.core.types import Image
from saccade.core.video import FrameBudget, FrameTimes
from saccade.media.content import Budget, Probe
from saccade.media.sources.fairness import Requester
from saccade.media.workers.decode_queue import Job

Kind = Literal["still", "video", "document", "region"]
"""The source of an image: an image file, frames of a video, a page of a document, or a region of an
image.
"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedBytes:
    """The encoded bytes of an image. They are stored once, however many requests use them."""

    data: bytes  # may be empty if `page` is set
    digest: bytes  # blake3
    page: PageOfFile | None = None  # the document's page from which `data` can be rendered again


@dataclass(frozen=True, slots=True, eq=False)
class PageOfFile:
    """Page `index` of a document, and how to render it."""

    file: EncodedBytes
    index: int
    drawing: PageDrawing


@dataclass(frozen=True, slots=True)
class PartOfImage:
    """The region `box` of an image whose header is `whole`."""

    whole: Probe
    box: Box

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """The corners (x0, y0, x1, y1) of the region, in pixels."""
        return self.box.left, self.box.top, self.box.right, self.box.bottom


@dataclass(frozen=True, slots=True, eq=False)
class CachedFrame:
    """A still image, or one frame of a video, with what is needed to decode it."""

    name: bytes  # content hash, or a placeholder
    encoded: EncodedBytes
    probe: Probe
    recipe: PreprocessParams
    index: int | None = None  # index of the frame in a video file, or None
    part: PartOfImage | None = None  # the region of `encoded` to show; `probe` then describes it


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """How long it took to read a source, and when the read started."""

    fetch_ms: float
    digest_ms: float
    begun: float  # `time.monotonic()` when the fetch started

    @classmethod
    def together(cls, times: Sequence[ReadTimes]) -> ReadTimes:
        """Return the sum of the times of concurrent reads, with the earliest start."""
        return cls(
            sum(each.fetch_ms for each in times),
            sum(each.digest_ms for each in times),
            min(each.begun for each in times),
        )


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """An opened image, with everything that the engine and the image workers need."""

    kind: Kind
    image: Image  # the engine's description
    frames: tuple[CachedFrame, ...]  # decoded onto one canvas, one below another; one for a still
    requester: Requester
    times: ReadTimes
    budget: Budget | FrameBudget | None = None
    """The size bounds of a still image, or of video frames sent as images. `None` for frames of a
    video file.
    """

    @property
    def of_video(self) -> bool:
        return self.kind == "video"

    @property
    def images(self) -> tuple[OpenedImage, ...]:
        return (self,)

    @property
    def steps(self) -> tuple[int | None, ...]:
        return (None,)

    @property
    def probe(self) -> Probe:
        return self.frames[0].probe

    @property
    def encoded(self) -> EncodedBytes:
        return self.frames[0].encoded

    @property
    def data(self) -> bytes:
        return self.encoded.data

    @property
    def there(self) -> bool:
        """True if the encoded bytes of all frames are in memory."""
        return all(frame.encoded.data for frame in self.frames)

    @property
    def nbytes(self) -> int:
        """The encoded size of all frames, in bytes. A file with more than one frame counts once."""
        return sum(len(each.data) for each in {frame.encoded for frame in self.frames})


@dataclass(frozen=True, slots=True, eq=False)
class OpenedVideo:
    """An opened video, as the images that the model sees, in order."""

    images: tuple[OpenedImage, ...]
    text: str  # the prompt's text for the images
    steps: tuple[int | None, ...]  # `Span.time` of each image
    times: FrameTimes


Opened = OpenedImage | OpenedVideo


@dataclass(slots=True)
class Spent:
    """How long decoding and encoding an image in flight has taken so far."""

    decode_ms: float = 0.0
    encode_ms: float = 0.0
    ship_ms: float = 0.0
    decoded: float = 0.0  # `time.monotonic()` when decoding finished
    shipped: float = 0.0  # `time.monotonic()` when the pixels were in shared memory
    encoded: float = 0.0  # `time.monotonic()` when the vision encoder finished
    encoder: str = ""  # the outcome of a request to an encoder server; "" without a request
    encoder_ms: float = 0.0  # duration of that request, including that server's `encode_ms`


def jobs_of(opened: OpenedImage) -> list[Job]:
    """Return a decode job for each frame of an image, in canvas order."""
    requester = opened.requester
    return [
        Job(
            frame.encoded.digest,
            frame.encoded.data,
            frame.probe,
            frame.recipe,
            requester.client,
            requester.request,
            frame=frame.index,
            tenant=requester.tenant,
        )
        for frame in opened.frames
    ]
