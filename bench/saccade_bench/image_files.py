"""Images as encoded files, as data URLs and as parts of chat messages."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def save(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    """Encode an image or its pixels (uint8 [H, W, 3]) as a file."""
    file = io.BytesIO()
    made = image if isinstance(image, Image.Image) else Image.fromarray(image)
    made.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, kind: str = "image/png", **fields: Any) -> dict[str, Any]:
    """Return a file as an `image_url` part. `fields` are added to its URL object."""
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), **fields}}
