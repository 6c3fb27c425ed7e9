"""Images within a request: ids of uploaded files, and base64 as clients write it, in lines, without
its padding, or in the alphabet for URLs.

All users of an image's bytes share one reading, whose digest is the image's name. Callers check
limits.
"""

from __future__ import annotations

import re
from contextlib import suppress

import pybase64

FILE_ID = re.compile(r"file-([0-9a-f]{64})-([0-9a-f]{8})")
"""An uploaded file's id: its content's digest, and which upload of it."""


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode base64 `text` from `start` on. Raises ValueError."""
    data = text[start:]
    with suppress(ValueError):  # as most write it: looked at once
        return pybase64.b64decode(data, validate=True)
    if any(
        space in data for space in " \n\r\t\f"
    ):  # `base64 FILE` prints lines, and browsers read them
        data = "".join(data.split())
    data += "=" * (-len(data) % 4)  # some clients leave the padding out
    url_safe = b"-_" if "-" in data or "_" in data else None
    return pybase64.b64decode(data, altchars=url_safe, validate=True)
