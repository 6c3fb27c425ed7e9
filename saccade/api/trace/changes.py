"""What a request's newest images show that the images before them did not.

Owns the comparison and the header with its result.
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
"""Response header with the fraction of the newest image that differs from the one before."""
EARLIER = "an earlier request"
MAX_COMPARED = 64
"""Images of a request that are compared, the newest. Each is compared with all of these."""
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class ImageChange:
    """share: of the squares that differ from the image before. same_as: the place of the latest
    image that has the same pixels.
    """

    share: float | None = None
    same_as: str | None = None


NO_CHANGE = ImageChange()


class ImageChanges:
    """The changes between a request's still images, in order. `prints` knows their pixels."""

    def __init__(self, prepared: PreparedRequest, prints: PixelPrints) -> None:
        self._prints = prints
        opened = [each for each in enumerate(prepared.opened) if each[1].kind == "still"]
        self._shown: list[tuple[int, ImageKey, str]] = [
            (number, each.image.key, prepared.places[number]) for number, each in opened
        ][-MAX_COMPARED:]
        self._before = prepared.shown_before
        prints.watch(key for _, key, _ in self._shown)

    def by_image(self) -> dict[int, ImageChange]:
        """Return the changes by the images' numbers. Call once the answer has begun."""
        return {number: self._change(at, key) for at, (number, key, _) in enumerate(self._shown)}

    @property
    def newest(self) -> float | None:
        """Return the share of the newest image that differs from the image before."""
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
        """Yield the images before one, the latest first. A lone image follows its session's."""
        for _, key, place in reversed(self._shown[:at]):
            yield key, place
        if len(self._shown) == 1 and self._before is not None:
            yield self._before, EARLIER


def telling(send: Send, changes: ImageChanges) -> Send:
    """Return a `send` that adds the header, once the answer begins."""

    async def send_with_change(message: Message) -> None:
        if message["type"] == "http.response.start" and (share := changes.newest) is not None:
            MutableHeaders(scope=message)[CHANGED_HEADER] = f"{share:g}"
        await send(message)

    return send_with_change
