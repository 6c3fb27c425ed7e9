"""Fields of a request that apply to all of its images, videos and documents.

This module has the schema of `mm_processor_kwargs`, and computes the defaults of parts that do not
set these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from saccade.core.config import WHOLE_DOCUMENT, DocumentView, PageView
from saccade.core.errors import InvalidRequest
from saccade.front.fields import FrameCount, Positive
from saccade.front.video_parts import NO_VIDEO_DEFAULTS, MediaReading, Rate, VideoDefaults
from saccade.media.content import Budget, Detail

MAX_PAGES = 1000
"""Maximum number of pages that one request may list."""
PageNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class DocumentOptions(Struct, forbid_unknown_fields=True):
    """Options for PDFs. Other servers do not have them."""

    documents: PageView | None = None
    """How the model sees a PDF's pages: text, images, both, or bare images without page numbers."""
    pages: Annotated[list[PageNumber], Meta(min_length=1, max_length=MAX_PAGES)] | None = None
    """The pages that the model sees, counted from 1, in this order. Default: all."""

    @property
    def view(self) -> DocumentView:
        return DocumentView(self.documents or "both", tuple(self.pages or ()))


class EdgeBounds(Struct, forbid_unknown_fields=True, kw_only=True):
    """`min_pixels` and `max_pixels`, as the processors of Qwen's checkpoints name them."""

    shortest_edge: Positive | None = None
    """min_pixels, under the name that Qwen's processors use."""
    longest_edge: Positive | None = None
    """max_pixels, under the name that Qwen's processors use."""


class ImageBounds(Struct, forbid_unknown_fields=True, kw_only=True):
    """Pixel limits that apply only to images."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    size: EdgeBounds | None = None
    """min_pixels and max_pixels, under the names of Qwen's processors."""


class ImageLimits(Struct, forbid_unknown_fields=True, kw_only=True):
    """Pixel limits for images without their own limits, and how to sample videos
    (`mm_processor_kwargs`).
    """

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    size: EdgeBounds | None = None
    """min_pixels and max_pixels, under the names of Qwen's processors."""
    images_kwargs: ImageBounds | None = None
    """The same options for images alone."""
    fps: Rate | None = None
    num_frames: FrameCount | None = None
    do_sample_frames: Literal[True] | None = None
    """Must be true, because the server always samples frames."""


@dataclass(frozen=True, slots=True)
class PartDefaults:
    """The options of a request for images, videos and documents that do not set their own."""

    # for images without their own limits
    image: Budget = Budget()  # noqa: RUF009 - frozen
    video: VideoDefaults = NO_VIDEO_DEFAULTS
    view: DocumentView = WHOLE_DOCUMENT

    @classmethod
    def of(
        cls,
        limits: ImageLimits | None,
        media: MediaReading | None,
        documents: DocumentOptions | None = None,
    ) -> PartDefaults:
        """Convert the fields `mm_processor_kwargs`, `media_io_kwargs` and `saccade` of a
        request.
        """
        given = limits or ImageLimits()
        reading = None if media is None else media.video
        video = VideoDefaults(
            fps=given.fps,
            num_frames=given.num_frames,
            min_pixels=given.min_pixels,
            max_pixels=given.max_pixels,
            reading=reading,
            sized=given.size is not None,
        )
        own = given.images_kwargs or ImageBounds()
        edges = [each for each in (given.size, own.size) if each is not None]
        shortest = (each.shortest_edge for each in edges)
        longest = (each.longest_edge for each in edges)
        least = _one("min_pixels", given.min_pixels, own.min_pixels, *shortest)
        most = _one("max_pixels", given.max_pixels, own.max_pixels, *longest)
        image = Budget(min_pixels=least, max_pixels=most, as_edges=bool(edges))
        view = WHOLE_DOCUMENT if documents is None else documents.view
        return cls(image, video, view)

    def budget(self, detail: Detail | None, least: int | None, most: int | None) -> Budget:
        """Return the size limits of one image: its own limits, completed with the request's."""
        own = self.image
        return Budget(
            detail or "auto",
            own.min_pixels if least is None else least,
            own.max_pixels if most is None else most,
            own.as_edges,
        )


NO_DEFAULTS = PartDefaults()


def _one(name: str, *given: int | None) -> int | None:
    """Return a limit that can be set in several fields, or None. Raises InvalidRequest if their
    values differ.
    """
    found = {each for each in given if each is not None}
    if len(found) > 1:
        where = "mm_processor_kwargs"
        raise InvalidRequest(
            f"{where}: {name} is set twice, to {' and as '.join(map(str, sorted(found)))}", where
        )
    return found.pop() if found else None
