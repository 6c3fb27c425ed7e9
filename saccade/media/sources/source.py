"""Images, videos and files as a request refers to them, by URL, upload, digest or bytes, with the
options for each.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from saccade.core.config import WHOLE_DOCUMENT, DocumentView
from saccade.core.errors import ImageError
from saccade.core.family import PixelBounds
from saccade.core.given_paths import reason, regular, shown
from saccade.core.video import VideoOptions
from saccade.media.content import Budget, Probe, encode_array
from saccade.media.opened import EncodedBytes, Kind

LONG_URL = 1 << 13
"""A URL of at least this many characters is assumed to contain the image itself."""
DEFAULT_BUDGET = Budget()
NO_VIDEO_OPTIONS = VideoOptions()


@dataclass(frozen=True, slots=True)
class FileId:
    """The id of an uploaded file."""

    id: str


@dataclass(frozen=True, slots=True)
class Base64:
    """The bytes of an image as base64.

    APIs with a field for base64 use this to avoid copying the text into a data: URL.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Digest:
    """An image that the same tenant has sent before, by the digest of its bytes.

    name: "blake3-HEX" or "sha256-HEX".
    """

    name: str


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image that was sent before with this `uuid`, which the client chose."""

    uuid: str


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPage:
    """A page of a document that was rendered as an image."""

    encoded: EncodedBytes  # without the data if the page has not just been rendered
    probe: Probe
    begun: float  # `time.monotonic()` when the document was opened


Address = str | bytes | Base64 | FileId | Digest | KnownImage | RenderedPage


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image in a request, with the options for it."""

    kind: ClassVar[Kind] = "still"

    url: Address
    param: str  # the path of the request's field, for errors
    budget: Budget = DEFAULT_BUDGET
    uuid: str = ""  # the name by which later requests can refer to the image


@dataclass(frozen=True, slots=True)
class ImageRegion:
    """A rectangular part of an image, as sent in a request.

    Coordinates are relative to the top left corner. They are in pixels of the upright image at full
    size, or in points for a page of a document.
    """

    left: int
    top: int
    right: int
    bottom: int
    param: str  # the path of the request's field, for errors


@dataclass(frozen=True, slots=True)
class RegionSource(ImageSource):
    """A region of an image, which the model sees as a separate image."""

    kind: ClassVar[Kind] = "region"

    region: ImageRegion = ImageRegion(0, 0, 0, 0, "")


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video in a request: a video file, or frames that the client sends as images, in order."""

    kind: ClassVar[Kind] = "video"

    url: Address | tuple[Address, ...]  # the file, or each frame
    param: str  # the path of the request's field, for errors
    options: VideoOptions = NO_VIDEO_OPTIONS
    # The indices of the client's frames in the original video, which has `source_fps` frames per
    # second. If empty, the client's frames are all the frames of the video.
    indices: tuple[int, ...] = ()
    source_fps: float | None = None
    count: int | None = None  # how many frames the client has, if this source has only some of them


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file in a request: a document, whose pages the model sees, or an image."""

    kind: ClassVar[Kind] = "document"

    url: Address
    param: str  # the path of the request's field, for errors
    budget: Budget = DEFAULT_BUDGET  # size options for each page, or for the image
    heading: str = ""  # text before the document
    view: DocumentView = WHOLE_DOCUMENT  # which pages are shown, as text or as images
    page: int | None = None  # the only page to show, if the content part sets `page`
    region: ImageRegion | None = None  # the part of the image, or of `page`, to show

    def __post_init__(self) -> None:
        if self.page is not None:
            object.__setattr__(self, "view", replace(self.view, pages=(self.page,)))
        if self.region is not None:
            object.__setattr__(self, "view", replace(self.view, shown="bare"))


Source = ImageSource | VideoSource


def name_of(url: Address) -> Hashable:
    """Return a dictionary key that is equal for sources with the same address.

    For bytes and long strings the key is their identity, because hashing them to a digest later is
    cheaper than comparing them.
    """
    if isinstance(url, FileId | Digest | KnownImage | RenderedPage):
        return url
    if len(url.text if isinstance(url, Base64) else url) < LONG_URL:
        return url
    return id(url)


def comes_along(url: Address) -> bool:
    """Return True if the request itself contains the bytes."""
    if isinstance(url, str):
        return url[:5].lower() == "data:"
    return isinstance(url, bytes | Base64)


def in_company(sources: Sequence[Source], bounds: PixelBounds) -> Sequence[Source]:
    """Return the sources, with lower pixel limits if the model shrinks images in prompts with this
    many images.
    """
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
    """Return the budget of an image in a prompt with `images` images in total."""
    shrunk = bounds.cut is not None and images > bounds.cut
    return Budget(max_pixels=bounds.least) if shrunk else budget


def source_from_object(image: object, param: str) -> ImageSource:
    """Convert a Python object to a source.

    Raises ImageError if the object is not supported or the file cannot be read.

    image: encoded bytes, a Pillow image, a uint8 array [height, width, 3], or a path.
    """
    match image:
        case bytes():
            return ImageSource(image, param)
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
    from PIL.Image import Image  # only `LLM` passes other objects

    from saccade.media.pillow_images import encode_image

    if isinstance(image, Image):
        return ImageSource(encode_image(image), param)
    raise ImageError(
        f"an image must be bytes, a PIL image, a uint8 array or a path, not {type(image).__name__}",
        param,
    )
