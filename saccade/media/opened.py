"""What the front knows about opened images and videos: hashes, sizes, sources. Data only,
made by `media/media.py`.
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
"""What an image is shown of: a source of its own, frames of a video, a page of a document, a part
of a still.
"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedBytes:
    """An image's bytes, held once for any number of requests. `digest` is the blake3. page: the
    document's page to draw the bytes from again, in which case `data` may be empty.
    """

    data: bytes
    digest: bytes
    page: PageOfFile | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PageOfFile:
    """Page `index` of a document, and how it is drawn."""

    file: EncodedBytes
    index: int
    drawing: PageDrawing


@dataclass(frozen=True, slots=True)
class PartOfImage:
    """The part in `box` of an image with the header `whole`."""

    whole: Probe
    box: Box

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """Return (x0, y0, x1, y1)."""
        return self.box.left, self.box.top, self.box.right, self.box.bottom


@dataclass(frozen=True, slots=True, eq=False)
class CachedFrame:
    """A frame of a video, or a still image. It is an image of its own, or number `index` among a
    file's frames. `name` is the digest, or a placeholder. part: the part of the image in
    `encoded`, where `probe` describes that part.
    """

    name: bytes
    encoded: EncodedBytes
    probe: Probe
    recipe: PreprocessParams
    index: int | None = None
    part: PartOfImage | None = None


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Times in ms. `begun` is `time.monotonic()` when the bytes began to be fetched."""

    fetch_ms: float
    digest_ms: float
    begun: float

    @classmethod
    def together(cls, times: Sequence[ReadTimes]) -> ReadTimes:
        """Sum the times of several concurrent reads. `begun` is the earliest."""
        return cls(
            sum(each.fetch_ms for each in times),
            sum(each.digest_ms for each in times),
            min(each.begun for each in times),
        )


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """An opened image. `image` is the engine's part. `frames` is the decoder's: the frames on the
    canvas, one below another. A still image is one frame.

    budget: bounds of a still image's size, or of a video's frames that came as images. It is `None`
    for frames of a file.
    """

    kind: Kind
    image: Image
    frames: tuple[CachedFrame, ...]
    requester: Requester
    times: ReadTimes
    budget: Budget | FrameBudget | None = None

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
        """Return True if all the image's bytes are held."""
        return all(frame.encoded.data for frame in self.frames)

    @property
    def nbytes(self) -> int:
        """Count the bytes of all frames. A file counts once."""
        return sum(len(each.data) for each in {frame.encoded for frame in self.frames})


@dataclass(frozen=True, slots=True, eq=False)
class OpenedVideo:
    """An opened video: images, in order. `text` is the prompt's words for the images, and `steps`
    is `Span.time` of each.
    """

    images: tuple[OpenedImage, ...]
    text: str
    steps: tuple[int | None, ...]
    times: FrameTimes


Opened = OpenedImage | OpenedVideo


@dataclass(slots=True)
class Spent:
    """The cost so far of the pixels and the embedding of an image in flight.

    `decoded`, `shipped` and `encoded` are `time.monotonic()` when an image worker was done with it,
    when its pixels were in the engine's memory, and when the vision encoder was done. `encoder` is
    how a question to another server ended ("" without a question). `encoder_ms` is its time,
    including `encode_ms` of the other tower.
    """

    decode_ms: float = 0.0
    encode_ms: float = 0.0
    ship_ms: float = 0.0
    decoded: float = 0.0
    shipped: float = 0.0
    encoded: float = 0.0
    encoder: str = ""
    encoder_ms: float = 0.0


def jobs_of(opened: OpenedImage) -> list[Job]:
    """Return the parts to decode for an image, in the canvas's order."""
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
