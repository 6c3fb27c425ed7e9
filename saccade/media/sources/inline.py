"""Decodes images inside a request from base64.

Base64 may be split into lines, lack its padding, or use the URL-safe alphabet, because clients
differ.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass

import pybase64

from saccade.core.errors import ImageError, TooLarge

INLINE_CHARACTERS = 1 << 20
"""Base64 text of up to this length is decoded on the event loop (0.2 ms), longer text on a
thread.
"""
FILE_ID = re.compile(r"file-([0-9a-f]{64})-([0-9a-f]{8})")
"""An uploaded file's id: the digest of its content, and a suffix for each upload of that content.
"""


def decode_base64(text: str, start: int = 0) -> bytes:
    """Return the bytes that are encoded as base64 in `text[start:]`. Raises ValueError."""
    data = text[start:]
    with suppress(ValueError):  # fast path: most clients send standard base64
        return pybase64.b64decode(data, validate=True)
    if any(
        space in data for space in " \n\r\t\f"
    ):  # `base64 FILE` prints several lines, and browsers accept whitespace
        data = "".join(data.split())
    data += "=" * (-len(data) % 4)  # some clients leave the padding out
    url_safe = b"-_" if "-" in data or "_" in data else None
    return pybase64.b64decode(data, altchars=url_safe, validate=True)


@dataclass(frozen=True, slots=True)
class InlineBytes:
    """Decodes base64 images with at most `max_image_bytes` bytes."""

    max_image_bytes: int

    async def decode_url(self, url: str) -> bytes:
        """Return the bytes in a data: URL.

        Raises ImageError if it is not base64, and TooLarge if it exceeds `max_image_bytes`.
        """
        comma = url.find(",", 0, 512)
        if comma < 0:
            raise ImageError(
                "the data: URL has no comma between its type and its data", code="invalid_image_url"
            )
        if not url[:comma].lower().endswith(";base64"):
            raise ImageError(
                "the data: URL is not in base64; write data:image/png;base64,...",
                code="invalid_image_url",
            )
        return await self.decode(url, comma + 1)

    async def decode(self, text: str, start: int = 0) -> bytes:
        """Return the bytes that are encoded as base64 in `text[start:]`.

        Raises ImageError if it is not base64, and TooLarge if it exceeds `max_image_bytes`.
        """
        self.check_size((len(text) - start) * 3 // 4)
        if len(text) <= INLINE_CHARACTERS:
            return _decode_base64(text, start)
        return await asyncio.to_thread(_decode_base64, text, start)

    def check_size(self, size: int) -> None:
        """Raise TooLarge if `size`, in encoded bytes, exceeds `max_image_bytes`."""
        limit = self.max_image_bytes
        if size > limit:
            raise TooLarge(
                f"the image is over {limit / 1e6:.3g} MB encoded; compress it, or start the "
                "server with a larger --tune max_image_bytes=N",
                code="image_too_large",
            )


_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/_-]")


def _decode_base64(text: str, start: int) -> bytes:
    try:
        return decode_base64(text, start)
    except ValueError as error:
        data = "".join(text[start:].split())
        named = "data: URL" if start else "image"
        raise ImageError(
            f"the {named} is not valid base64: {_why_not_base64(data)}",
            code="invalid_image_url",
        ) from error


def _why_not_base64(data: str) -> str:
    text = data.rstrip("=")
    if odd := _NOT_BASE64.search(text):
        return (
            f"character {odd.start() + 1} of {len(text)} is {odd.group()!r}; allowed are A-Z, a-z, "
            "0-9, + and / (or - and _), and = at the end"
        )
    if len(text) % 4 == 1:
        return f"{len(text)} characters, which is not a whole number of bytes: is it truncated?"
    return f"{len(data) - len(text)} characters = at the end; at most two are allowed there"
