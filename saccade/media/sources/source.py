"""Sources named by requests: images and videos by URL, uploaded file, name or bytes, with the
wishes for each.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import PIL.Image

from saccade.core.config import WHOLE_DOCUMENT, DocumentView
from saccade.core.errors import ImageError
from saccade.core.family import PixelBounds
from saccade.core.given_paths import reason, regular, shown
from saccade.core.video import VideoOptions
from saccade.media.content import Budget, Probe, encode_array, encode_image
from saccade.media.opened import EncodedBytes, Kind

LONG_URL = 1 << 13
"""Characters from which a URL is taken to hold the image itself."""
DEFAULT_BUDGET = Budget()
NO_VIDEO_OPTIONS = VideoOptions()


@dataclass(frozen=True, slots=True)
class FileId:
    """An uploaded file."""

    id: str


@dataclass(frozen=True, slots=True)
class Base64:
    """An image's bytes, as text. An API with a field for the bytes needs only this text, which
    spares a second copy inside a URL.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Digest:
    """An image that the same tenant has sent, by its bytes' digest: blake3-HEX or sha256-HEX."""

    name: str


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image sent before under the client's own name for it."""

    uuid: str


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPage:
    """A document's page, opened `begun`. It has the image's name and size, and, if just drawn, the
    bytes.
    """

    encoded: EncodedBytes
    probe: Probe
    begun: float


Address = str | bytes | Base64 | FileId | Digest | KnownImage | RenderedPage


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as named by a request: a URL, an uploaded file, an earlier name, or encoded bytes
    from behind the front.

    `param` is the place, for errors. `uuid`: a name for later requests.
    """

    kind: ClassVar[Kind] = "still"

    url: Address
    param: str
    budget: Budget = DEFAULT_BUDGET
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class ImageRegion:
    """A part of an image as named by a request, in the upright image's own pixels, from the left
    and from the top. A page of a document counts points. `param` is its place, for errors.
    """

    left: int
    top: int
    right: int
    bottom: int
    param: str


@dataclass(frozen=True, slots=True)
class RegionSource(ImageSource):
    """A part of an image, seen as an image of its own."""

    kind: ClassVar[Kind] = "region"

    region: ImageRegion = ImageRegion(0, 0, 0, 0, "")


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video as named by a request: a file, or the client's frames, in order.

    `param` is the place, for errors.
    """

    kind: ClassVar[Kind] = "video"

    url: Address | tuple[Address, ...]
    param: str
    options: VideoOptions = NO_VIDEO_OPTIONS
    # places of the client's frames in their video, which has `source_fps` frames per second.
    # Without indices, these are all the video's frames.
    indices: tuple[int, ...] = ()
    source_fps: float | None = None
    count: int | None = None  # all the client's frames, where only some of them are here


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file as named by a request: a document, whose pages are shown, or an image.

    `param` is the place, for errors.
    """

    kind: ClassVar[Kind] = "document"

    url: Address
    param: str
    budget: Budget = DEFAULT_BUDGET  # for each page, or for the image
    heading: str = ""  # lines before a document
    view: DocumentView = WHOLE_DOCUMENT  # which pages are shown, and as what
    page: int | None = None  # the only one, if the part itself sets it
    region: ImageRegion | None = None  # the part to show of an image, or of this page

    def __post_init__(self) -> None:
        if self.page is not None:
            object.__setattr__(self, "view", replace(self.view, pages=(self.page,)))
        if self.region is not None:
            object.__setattr__(self, "view", replace(self.view, shown="bare"))


Source = ImageSource | VideoSource


def name_of(url: Address) -> Hashable:
    """Return a key shared by sources of the same bytes. Bytes and texts of bytes are compared
    later, by digest, at less cost.
    """
    if isinstance(url, FileId | Digest | KnownImage | RenderedPage):
        return url
    if len(url.text if isinstance(url, Base64) else url) < LONG_URL:
        return url
    return id(url)


def comes_along(url: Address) -> bool:
    """Return True if the bytes came with the request."""
    if isinstance(url, str):
        return url[:5].lower() == "data:"
    return isinstance(url, bytes | Base64)


def in_company(sources: Sequence[Source], bounds: PixelBounds) -> Sequence[Source]:
    """Shrink each image to what the model shows when the prompt has several."""
    if bounds.cut is None:
        return sources
    images = sum(isinstance(source, ImageSource) for source in sources)
    return [
        replace(source, budget=beside(source.budget, images, bounds))
        if isinstance(source, ImageSource)
        else source
        for source in sources
    ]


def beside(budget: Budget, images: int, bounds: PixelBounds) -> Budget:
    """Return an image's budget in a prompt with `images` images."""
    shrunk = bounds.cut is not None and images > bounds.cut
    return Budget(max_pixels=bounds.least) if shrunk else budget


def source_from_object(image: object, param: str) -> ImageSource:
    """Make a source from an object behind the front. The object is encoded bytes, a Pillow image, a
    uint8 array [height, width, 3], or a path.

    Raises ImageError for anything else, and for an unreadable file.
    """
    match image:
        case bytes():
            return ImageSource(image, param)
        case PIL.Image.Image():
            return ImageSource(encode_image(image), param)
        case np.ndarray():
            return ImageSource(encode_array(image), param)
        case os.PathLike():
            try:
                with open(image, "rb", opener=regular) as file:
                    return ImageSource(file.read(), param)
            except (OSError, ValueError) as error:
                raise ImageError(
                    f"{shown(os.fspath(image))} cannot be read: {reason(error)}", param
                ) from error
    raise ImageError(
        f"an image must be bytes, a PIL image, a uint8 array or a path, not {type(image).__name__}",
        param,
    )
