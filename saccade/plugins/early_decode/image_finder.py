"""Finds images in a JSON body while it arrives, without reading the JSON.

An image is a long string in base64 that a data: URL or a field `data` holds, wherever it is. Bytes
are looked at once and not copied: within an image, only its closing quote is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MIN_TEXT = 1 << 16
"""Characters of an image worth an early decode: smaller ones take a millisecond."""
MAX_SHORT = 1 << 10
"""Shorter strings that are looked at in a body, after which no image is searched for."""
_START = re.compile(rb'"data(?::image/[a-z.+-]{1,20};base64,|"\s{0,4}:\s{0,4}")')
_MAX_START = 48

Text = list[memoryview]
"""An image's base64, as chunks of the body."""


class ImageFinder:
    """The images of one body."""

    def __init__(self) -> None:
        self._tail = b""  # may have the start of a start
        self._text: Text | None = None  # of the image that is arriving
        self._num_short = 0

    def feed(self, chunk: bytes) -> Iterator[Text]:
        """Take the next bytes, and yield the images that they complete."""
        offset = 0
        while self._num_short < MAX_SHORT:
            if self._text is None:
                offset = self._find_start(chunk, offset)
                if offset < 0:
                    return
                self._text = []
            end = chunk.find(b'"', offset)
            self._text.append(memoryview(chunk)[offset : end if end >= 0 else None])
            if end < 0:
                return
            text, self._text, offset = self._text, None, end + 1
            if sum(map(len, text)) >= MIN_TEXT:
                yield text
            else:
                self._num_short += 1

    def _find_start(self, chunk: bytes, offset: int) -> int:
        """Return where the next image's base64 starts, or -1."""
        tail, self._tail = self._tail, b""
        match = _START.search(tail + chunk[:_MAX_START]) if tail else None
        if match is not None and match.start() < len(tail):
            return match.end() - len(tail)
        if (match := _START.search(chunk, offset)) is not None:
            return match.end()
        rest = chunk[max(offset, len(chunk) - _MAX_START) :]
        self._tail = (tail + rest)[-_MAX_START:]
        return -1
