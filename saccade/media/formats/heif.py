"""Detects HEIC, the format of photos from iPhones, which pillow-heif decodes if it is installed
(extra `heic`).

HEIC, AVIF and MP4 share a container, and `is_heic` distinguishes HEIC from the others. Images are
decoded in image workers only, where `thread_gate.py` limits the threads that libde265 starts.
"""

from __future__ import annotations

import base64

from saccade.media.reasons import READS_HEIC

FORMATS = ("HEIF",) if READS_HEIC else ()
"""Pillow's name of the format, if it is supported."""
SAMPLE = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAVZtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAA"
    "AAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABegABAAAAAAAAABMAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABo"
    "dmMxAAAAAA5waXRtAAAAAAABAAAA1mlwcnAAAAC3aXBjbwAAAHhodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEA"
    "GEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbqSSmubgIaDAgAAAMAyAAA"
    "AwAIQGIAAQAHRAHBcrAiQAAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAAQAAAABBwaXhpAAAAAAMI"
    "CAgAAAAXaXBtYQAAAAAAAAABAAEEgQIDBAAAABttZGF0AAAADygBrwUY/QENSf/XlfCTgA=="
)
"""A HEIC image of 64 x 64 black pixels. It is stored encoded because the encoder starts threads."""

BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
CONTAINERS = {b"mif1", b"msf1"}
"""Brands of HEIF images with any codec."""


def is_heic(head: bytes) -> bool:
    """Return True if a file is a HEIF image with the codec HEVC.

    head: the first 64 bytes of the file.
    """
    if head[4:8] != b"ftyp":
        return False
    size = min(int.from_bytes(head[:4], "big"), 64)
    further = {head[at : at + 4] for at in range(16, size, 4)}
    return head[8:12] in BRANDS or (head[8:12] in CONTAINERS and bool(further & BRANDS))


if READS_HEIC:
    import pillow_heif

    pillow_heif.register_heif_opener(
        decode_threads=0,  # no threads except libde265's own one per tile
        thumbnails=False,
        depth_images=False,
        aux_images=False,
    )
