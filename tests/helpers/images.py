"""Files of images of one colour, URLs of files, and the parts of a chat; images of every kind are
made by `tests/media/pictures.py`.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from saccade_bench.image_files import data_url as data_url
from tests.media.pictures import encode


def png(color: str = "red", size: tuple[int, int] = (64, 64)) -> bytes:
    """A file of one colour; its size in pixels is (width, height)."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def png_url(pixels: np.ndarray) -> str:
    return data_url(encode(pixels))


def image_part(pixels: np.ndarray | bytes, **fields: Any) -> dict[str, Any]:
    """An image of these pixels, or in this file. fields: beside its URL."""
    url = data_url(pixels) if isinstance(pixels, bytes) else png_url(pixels)
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def content(answer: Any) -> Any:
    """The text of a chat's answer."""
    return answer["choices"][0]["message"]["content"]
