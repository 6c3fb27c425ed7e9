"""HEIC, as iPhones write photos: read by pillow-heif, if installed (extra `heic`).

Owns the distinction from AVIF and video, and the errors' words. Runs in image workers only, where
the supervisor grants libde265's thread (`thread_gate.py`).
"""

from __future__ import annotations

import base64
from importlib.util import find_spec

from saccade.core.extras import ask_operator

INSTALLED = find_spec("pillow_heif") is not None
FORMATS = ("HEIF",) if INSTALLED else ()
"""By Pillow's name."""
MISSING = (
    "the image is a HEIC image, which this server cannot read: send it as JPEG, "
    f"or {ask_operator('heic')}"
)
NO_THREADS = (
    "it is a HEIC image, and this kernel cannot limit the threads of its decoder: send it as JPEG"
)
SAMPLE = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAVZtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAA"
    "AAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABegABAAAAAAAAABMAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABo"
    "dmMxAAAAAA5waXRtAAAAAAABAAAA1mlwcnAAAAC3aXBjbwAAAHhodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEA"
    "GEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbqSSmubgIaDAgAAAMAyAAA"
    "AwAIQGIAAQAHRAHBcrAiQAAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAAQAAAABBwaXhpAAAAAAMI"
    "CAgAAAAXaXBtYQAAAAAAAAABAAEEgQIDBAAAABttZGF0AAAADygBrwUY/QENSf/XlfCTgA=="
)
"""64 x 64 black pixels. Made beforehand, for the encoder starts threads."""

BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
CONTAINERS = {b"mif1", b"msf1"}
"""Brands of images of any codec."""


def is_heic(head: bytes) -> bool:
    """Return True if a file begins as an image in HEVC. `head` is the first 64 bytes."""
    if head[4:8] != b"ftyp":
        return False
    size = min(int.from_bytes(head[:4], "big"), 64)
    further = {head[at : at + 4] for at in range(16, size, 4)}
    return head[8:12] in BRANDS or (head[8:12] in CONTAINERS and bool(further & BRANDS))


if INSTALLED:
    import pillow_heif

    pillow_heif.register_heif_opener(
        decode_threads=0,  # no more than the one for each tile
        thumbnails=False,
        depth_images=False,
        aux_images=False,
    )
