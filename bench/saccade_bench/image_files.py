"""Images as files, as URLs and as parts of a chat."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def save(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    """Return the file of an image, which may be pixels, uint8 [H, W, 3]."""
    file = io.BytesIO()
    made = image if isinstance(image, Image.Image) else Image.fromarray(image)
    made.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, kind: str = "image/png", **fields: Any) -> dict[str, Any]:
    """Return a file as a part of a message. fields: beside its URL."""
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), **fields}}
