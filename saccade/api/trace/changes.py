"""Compares the newest images of a request with the images before them, for the trace and a response
header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from saccade.core.types import ImageKey
from saccade.front.prepared import PreparedRequest

if TYPE_CHECKING:
    from saccade.media.pixel_prints import PixelPrints

CHANGED_HEADER = "x-saccade-changed"
"""Response header: the fraction of the newest image that differs from the image before it."""
EARLIER = "an earlier request"
MAX_COMPARED = 64
"""Maximum number of images in a request that are compared with each other. They are the newest
ones.
"""
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class ImageChange:
    """How an image differs from earlier images of the conversation."""

    share: float | None = None  # fraction of the squares that differ from the previous image
    same_as: str | None = None  # path of the latest earlier image with identical pixels


NO_CHANGE = ImageChange()


class ImageChanges:
    """Compares the still images of a request in order. prints: compares the pixels of two
    images.
    """

    def __init__(self, prepared: PreparedRequest, prints: PixelPrints) -> None:
        self._prints = prints
        opened = [each for each in enumerate(prepared.opened) if each[1].kind == "still"]
        self._shown: list[tuple[int, ImageKey, str]] = [
            (number, each.image.key, prepared.places[number]) for number, each in opened
        ][-MAX_COMPARED:]
        self._before = prepared.shown_before
        prints.watch(key for _, key, _ in self._shown)

    def by_image(self) -> dict[int, ImageChange]:
        """Return the changes by index of the image. Call this after the answer has started."""
        return {number: self._change(at, key) for at, (number, key, _) in enumerate(self._shown)}

    @property
    def newest(self) -> float | None:
        """The fraction of the newest image that differs from the image before it, or None if
        unknown.
        """
        if not self._shown:
            return None
        at = len(self._shown) - 1
        return self._change(at, self._shown[at][1]).share

    def _change(self, at: int, key: ImageKey) -> ImageChange:
        before = list(self._earlier(at))
        if not before:
            return NO_CHANGE
        same = (place for each, place in before if self._prints.changed(key, each) == 0)
        share = self._prints.changed(key, before[0][0])
        return ImageChange(None if share is None else round(share, _DIGITS), next(same, None))

    def _earlier(self, at: int) -> Iterator[tuple[ImageKey, str]]:
        """Yield the images before image `at`, the latest first.

        If a request has only one image, yield the last image of the session's previous request.
        """
        for _, key, place in reversed(self._shown[:at]):
            yield key, place
        if len(self._shown) == 1 and self._before is not None:
            yield self._before, EARLIER


def telling(send: Send, changes: ImageChanges) -> Send:
    """Return a wrapper of `send` that adds the header `CHANGED_HEADER` when the response starts."""

    async def send_with_change(message: Message) -> None:
        if message["type"] == "http.response.start" and (share := changes.newest) is not None:
            MutableHeaders(scope=message)[CHANGED_HEADER] = f"{share:g}"
        await send(message)

    return send_with_change
