"""The inputs that are sent with every client: a picture, a response schema, a tool, a server."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

MAX_TOKENS = 24
MAX_FORMED_TOKENS = 300
"""Limit for answers with a schema, because a random model may make each as long as possible."""


@dataclass(frozen=True)
class Target:
    """The server at `base` (without /v1), its model, and a tokenizer's folder or name."""

    base: str
    model: str
    tokenizer: str

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"


class Shape(BaseModel):
    """What is in the picture. All fields are bounded, so that a random model can fill them in."""

    colour: Literal["red", "green", "blue"]
    shape: Literal["square", "circle", "star"]
    sure: bool


class Look(BaseModel):
    """Look closer at a part of the picture."""

    part: Literal["left", "right", "middle"]


LOOK_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer at a part of the picture.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "enum": ["left", "right", "middle"]}},
            "required": ["part"],
            "additionalProperties": False,
        },
    },
}
WAIT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "wait",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def png(width: int = 64, height: int = 64) -> bytes:
    """Return a PNG of a red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = (b"\0" + b"\xff\0\0" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


PNG = png()
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"
PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1"
    b">>endobj 3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 64 64]/Contents 4 0 R/Resources<</Font"
    b"<</F 5 0 R>>>>>>endobj 4 0 obj<</Length 31>>stream\nBT /F 12 Tf 4 24 Td (word) Tj ET\n"
    b"endstream endobj 5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj "
    b"trailer<</Root 1 0 R/Size 6>>\n%%EOF"
)
"""One page with the text "word". It has no cross-reference table, which readers can reconstruct."""
PDF_BASE64 = base64.b64encode(PDF).decode()
PDF_URL = f"data:application/pdf;base64,{PDF_BASE64}"
TEXTS = ["two blue squares", "the quick brown fox", "a red star"]
QUERY = "a fox"
QUESTION = "What colour is it?"
IMAGE_PART = {"type": "image_url", "image_url": {"url": URL}}
ASK: Any = {"role": "user", "content": [IMAGE_PART, {"type": "text", "text": QUESTION}]}
AGAIN: Any = {"role": "user", "content": "Are you sure?"}


def check_call(name: str, arguments: str | dict[str, Any]) -> str:
    """Return the part named by a call of `look`. Raises AssertionError or ValidationError."""
    assert name == "look", name
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return Look.model_validate(read).part
