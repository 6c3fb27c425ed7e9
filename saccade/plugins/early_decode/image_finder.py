"""Finds images in a JSON body while it arrives, without parsing the JSON.

An image is a long base64 string in a data: URL or in a field `data`, at any place of the body. Each
byte is scanned once and not copied. Within an image, only the closing quote is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MIN_TEXT = 1 << 16
"""Minimum characters of an image for an early decode. Decoding a smaller one takes about 1 ms."""
MAX_SHORT = 1 << 10
"""Maximum number of shorter strings. After them, the rest of the body is not scanned."""
_START = re.compile(rb'"data(?::image/[a-z.+-]{1,20};base64,|"\s{0,4}:\s{0,4}")')
_MAX_START = 48

Text = list[memoryview]
"""The base64 of an image, as chunks of the body."""


class ImageFinder:
    """Scans one body for images."""

    def __init__(self) -> None:
        self._tail = b""  # the last bytes, in case an image's prefix is split between two chunks
        self._text: Text | None = None  # of the image that is arriving
        self._num_short = 0

    def feed(self, chunk: bytes) -> Iterator[Text]:
        """Scan the next bytes of the body, and yield the images that they complete."""
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
        """Return the index in `chunk` where the next image's base64 starts, or -1 if there
        is none.
        """
        tail, self._tail = self._tail, b""
        match = _START.search(tail + chunk[:_MAX_START]) if tail else None
        if match is not None and match.start() < len(tail):
            return match.end() - len(tail)
        if (match := _START.search(chunk, offset)) is not None:
            return match.end()
        rest = chunk[max(offset, len(chunk) - _MAX_START) :]
        self._tail = (tail + rest)[-_MAX_START:]
        return -1
