"""Computes an image's digest, key, resized size and token count from its encoded bytes and header,
in the front end.

This module parses no image format, because the bytes may be hostile. An image worker reads the
header (`media/formats/header.py`) and returns a `Probe`.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec, PixelBounds
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Image, ImageKey
from saccade.media.reasons import Unreadable

Detail = Literal["auto", "low", "high", "original"]

LOW_DETAIL_PIXELS = 512 * 512
"""The maximum pixels for OpenAI's `detail: "low"`. With any other value, the model's bounds apply.
"""

RAW = "RAW"
"""`Probe.format` of images that are already decoded to RGB."""
VIDEO = "VIDEO"
"""`Probe.format` of all video files, regardless of the container."""
IMAGE_BRANDS = frozenset(
    (b"avif", b"avis", b"mif1", b"msf1", b"miaf", b"heic", b"heix", b"heim", b"heis", b"hevc")
)
"""`ftyp` brands of AVIF and HEIC images, which use the same box structure as MP4 videos."""
_SIZES = ThreadPoolExecutor(1, "saccade-sizes")
RAW_HEADER = struct.Struct("<8sII")
RAW_MAGIC = b"\x93SACRAW\n"
"""Starts an image in Saccade's own uncompressed format: this magic, height, width, RGB bytes. It is
used for decoded images that are passed in from Python.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """The header of an image or a video file, as an image worker reports it."""

    format: str
    height: int  # pixels, as stored
    width: int
    mode: str  # Pillow's mode, such as "RGB"
    orientation: int  # EXIF orientation, 1 (upright) to 8; for a video, the display rotation
    frames: int | None  # None for an image if counting requires reading the entire file
    fps: float = 0.0  # videos only
    sound: bool = False  # whether a video has an audio track

    @property
    def upright(self) -> tuple[int, int]:
        """The (height, width) after the orientation is applied."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


@dataclass(frozen=True, slots=True)
class Budget:
    """The size options that a request sets for one image."""

    detail: Detail = "auto"  # OpenAI's option `detail`
    min_pixels: int | None = None  # bounds on height * width after resizing
    max_pixels: int | None = None
    as_edges: bool = False  # whether the client sent the bounds as shortest_edge and longest_edge

    def apply(self, bounds: PixelBounds) -> PixelBounds:
        """Return `bounds`, changed by the options of this image.

        Raises ImageError if the options contradict each other or exceed the model's limits.
        """
        if self.as_edges and not bounds.as_edges:
            raise ImageError(
                "mm_processor_kwargs.size: shortest_edge and longest_edge are not supported by "
                "this model: send min_pixels and max_pixels",
                code="unsupported_parameter",
            )
        least, most = self.min_pixels, self.max_pixels
        if self.detail == "low" and most is None:
            most = min(LOW_DETAIL_PIXELS, bounds.max_pixels)
        if least is None and most is None:
            return bounds
        most = bounds.max_pixels if most is None else most
        least = min(bounds.min_pixels, most) if least is None else least
        if not bounds.least <= most <= bounds.max_pixels:
            raise ImageError(
                f"max_pixels is {most}; this model supports {bounds.least} to {bounds.max_pixels}"
            )
        if not 0 < least <= most:
            raise ImageError(
                f"min_pixels is {least}; it must be above 0 and at most max_pixels ({most})"
            )
        return replace(bounds, min_pixels=least, max_pixels=most)


@dataclass(frozen=True, slots=True)
class SizedImage:
    """An image as it is sent to the engine, and the parameters for preprocessing its pixels."""

    image: Image
    recipe: PreprocessParams


def digest(data: bytes) -> bytes:
    """Return the blake3-256 hash of the encoded bytes.

    This releases the GIL, so hash large bodies on a thread.
    """
    return blake3(data).digest()


def identify(
    digest: bytes, probe: Probe, budget: Budget, salt: str, spec: FamilySpec
) -> SizedImage:
    """Return an image's key, its token and patch counts, and its preprocessing parameters.

    Raises ImageError if a budget or an aspect ratio is out of bounds.
    """
    bounds = budget.apply(spec.pixel_bounds)
    recipe = spec.recipe(*probe.upright, bounds)
    key, grid = ImageKey(digest, spec.settings(recipe), salt), recipe.grid
    image = Image(key, grid, spec.num_tokens(grid), spec.num_patches(grid), recipe.canvas)
    return SizedImage(image, recipe)


async def identify_soon(
    digest: bytes, probe: Probe, budget: Budget, salt: str, spec: FamilySpec
) -> SizedImage:
    """Call `identify` without blocking the event loop.

    The preprocessing operation of a model may query another process for the size. In this case, the
    call runs on a thread.
    """
    name = partial(identify, digest, probe, budget, salt, spec)
    if spec.sample.own is None:
        return name()
    return await asyncio.get_running_loop().run_in_executor(_SIZES, name)


@cache
def video_reader() -> str:
    """Return the version of PyAV, which reads videos, or "" if it is not installed."""
    try:
        return version("av")
    except PackageNotFoundError:
        return ""


def looks_like_video(data: bytes) -> bool:
    """Return True if the data starts with the signature of a supported video container."""
    head = data[:12]
    if head[4:8] == b"ftyp" and head[8:12] in IMAGE_BRANDS:
        return False
    return (
        head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
        or head[:4] == b"\x1a\x45\xdf\xa3"
        or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")
        or (len(data) > 188 and data[0] == data[188] == 0x47)
    )


class PixelNames(NamedTuple):
    """Content hashes of an image's resized pixels and of its tiles."""

    whole: bytes  # hash of all pixels
    tiles: tuple[bytes, ...] = ()  # hash of each tile, in the encoder's order; empty if not tiled


def name_pixels(pixels: memoryview, image: Image, frames: int) -> bytes:
    """Return the hash of `pixels`, which contain `frames` frames, one below the other.

    Pixels that the vision encoder cannot distinguish get the same hash, for example an image and a
    pair of equal frames.
    """
    size = len(pixels) // frames
    parts = {blake3(pixels[size * k : size * (k + 1)]).digest(): None for k in range(frames)}
    whole = parts if len(parts) == 1 else {blake3(pixels).digest(): None}
    facts = struct.pack(">4I", image.canvas[1], image.num_tokens, image.num_patches, len(parts))
    return blake3(facts + b"".join(whole)).digest()


def encode_array(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode RGB pixels [height, width, 3] in Saccade's own format.

    Raises ImageError for an array of another dtype or shape.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ImageError(
            f"an array must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}"
        )
    height, width, _ = pixels.shape
    return RAW_HEADER.pack(RAW_MAGIC, height, width) + pixels.tobytes()


def read_raw(data: bytes | mmap.mmap) -> Probe:
    """Read the header of an image in Saccade's own format. Raises Unreadable if it is truncated."""
    if len(data) >= RAW_HEADER.size:
        _, height, width = RAW_HEADER.unpack(data[: RAW_HEADER.size])
        if len(data) == RAW_HEADER.size + 3 * height * width:
            return Probe(RAW, height, width, "RGB", 1, 1)
    raise Unreadable("cut array")


def check_pixels(found: Probe, max_pixels: int) -> None:
    """Raise Unreadable if an image has no pixels or more than `max_pixels`."""
    pixels = found.height * found.width
    if pixels < 1:
        raise Unreadable("no pixels", found.width, found.height)
    if pixels > max_pixels:
        sizes = found.width, found.height, pixels / 1e6, max_pixels / 1e6
        raise Unreadable("too many pixels", *sizes)
