"""Decodes HTTP content codings (RFC 9110, 8.4), gzip and deflate, from a body as it arrives.

Some stores compress objects regardless of Accept-Encoding. Since a few bytes may decode to many,
output is in chunks, which the caller counts against its limits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from saccade.core.errors import ImageError

PIECE = 1 << 18
"""Maximum bytes of a decoded chunk, which takes half a millisecond to decode."""
MAX_MEMBERS = 16
"""Maximum number of concatenated compressed streams in a gzip body."""
GZIP = ("gzip", "x-gzip")
DEFLATE = "deflate"
BY_HEADER, RAW = zlib.MAX_WBITS | 32, -zlib.MAX_WBITS


class ContentDecoder:
    """Decodes the body of one response."""

    def __init__(self, header: str, url: str) -> None:
        """Set up the decoder. Raises ImageError for an unsupported coding.

        header: the value of the Content-Encoding header.
        url: the URL, for error messages.
        """
        names = [name.strip().lower() for name in header.split(",")]
        self._coding = ", ".join(name for name in names if name not in ("", "identity"))
        self._url = url
        self._head = b""
        self._members = 0
        self._stream: zlib._Decompress | None = None
        if self._coding not in ("", *GZIP, DEFLATE):
            raise self._error(
                "which is not supported: its server must send the image uncompressed, or with "
                "gzip or deflate"
            )

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the chunks of content decoded from `data`. Raises ImageError."""
        if not self._coding:
            yield data
            return
        while data:
            if self._stream is None:
                self._head, data = self._head + data, b""
                if len(self._head) < 2:
                    return
                data, self._head = self._head, b""
                self._stream = self._begin(data)
            try:
                piece = self._stream.decompress(data, PIECE)
            except zlib.error as error:
                raise self._error(f"and cannot be decompressed ({error})") from None
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                data, self._stream = self._stream.unused_data, None
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise ImageError if the body is truncated."""
        if self._coding and (self._stream is not None or self._head or not self._members):
            raise self._error("and is truncated")

    def _begin(self, data: bytes) -> zlib._Decompress:
        """Return the decoder for the next compressed stream, depending on its first two bytes."""
        self._members += 1
        if self._members > (1 if self._coding == DEFLATE else MAX_MEMBERS):
            raise self._error("and has trailing data")
        wrapped = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
        raw = self._coding == DEFLATE and not wrapped
        return zlib.decompressobj(RAW if raw else BY_HEADER)

    def _error(self, why: str) -> ImageError:
        return ImageError(
            f"{self._url} is compressed ({self._coding[:40]}), {why}", code="image_unreachable"
        )
