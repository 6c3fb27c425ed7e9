"""The front's knowledge about encoded bytes: digest, key, size after resizing, token count.

Reads no format. A `Probe` (a header's facts) comes from an image worker
(`media/formats/header.py`), for the bytes may be hostile.
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
import PIL.Image
import PIL.ImageOps
from blake3 import blake3

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec, PixelBounds
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Image, ImageKey
from saccade.media.reasons import Unreadable

Detail = Literal["auto", "low", "high", "original"]

LOW_DETAIL_PIXELS = 512 * 512
"""OpenAI's `detail: "low"` looks at an image at 512 x 512. The others mean the model's own
bounds.
"""

RAW = "RAW"
"""The format of pixels that are decoded already."""
VIDEO = "VIDEO"
"""The format of a video file, whatever its container."""
IMAGE_BRANDS = frozenset(
    (b"avif", b"avis", b"mif1", b"msf1", b"miaf", b"heic", b"heix", b"heim", b"heis", b"hevc")
)
"""AVIF and HEIC are boxes as mp4 is, and say so by these."""
_SIZES = ThreadPoolExecutor(1, "saccade-sizes")
RAW_HEADER = struct.Struct("<8sII")
RAW_MAGIC = b"\x93SACRAW\n"
"""Our own format for pixels that enter behind the front: this magic, height, width, then RGB bytes.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """The header's facts. `height` and `width` are in pixels as stored. `orientation` is EXIF's, 1
    to 8, 1 being upright. For a video it is what the file asks of a player.

    `frames` is `None` if counting them would require reading the whole file. Only the first is ever
    used. In a video file (`VIDEO`) all are counted, `fps` is frames per second, and `sound` is True
    if there is something to be heard.
    """

    format: str
    height: int
    width: int
    mode: str
    orientation: int
    frames: int | None
    fps: float = 0.0
    sound: bool = False

    @property
    def upright(self) -> tuple[int, int]:
        """Return (height, width) once the orientation is applied."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


@dataclass(frozen=True, slots=True)
class Budget:
    """One image's own wishes for its size: OpenAI's `detail`, and bounds on height * width after
    resizing. as_edges: the client called these edges, as some checkpoints' processors do.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    as_edges: bool = False

    def apply(self, bounds: PixelBounds) -> PixelBounds:
        """Return the bounds for resizing this image.

        Raises ImageError if the wishes contradict each other or the model's limit.
        """
        if self.as_edges and not bounds.as_edges:
            raise ImageError(
                "mm_processor_kwargs.size: this model's sizes are not bounded by shortest_edge and "
                "longest_edge in pixels: send min_pixels and max_pixels",
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
    """An image as the engine will know it, and the recipe for its pixels."""

    image: Image
    recipe: PreprocessParams


def digest(data: bytes) -> bytes:
    """Return the blake3-256 hash of the encoded bytes.

    Releases the GIL, so hash large bodies on a thread.
    """
    return blake3(data).digest()


def identify(
    digest: bytes, probe: Probe, budget: Budget, salt: str, spec: FamilySpec
) -> SizedImage:
    """Name an image and its cost.

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
    """Name an image as `identify` does. Models with an operation of their own may ask another
    process for the size, so they use a thread.
    """
    name = partial(identify, digest, probe, budget, salt, spec)
    if spec.sample.own is None:
        return name()
    return await asyncio.get_running_loop().run_in_executor(_SIZES, name)


@cache
def video_reader() -> str:
    """Return the version of the video reader's distribution, or "" if missing."""
    try:
        return version("av")
    except PackageNotFoundError:
        return ""


def looks_like_video(data: bytes) -> bool:
    """Return True if the data begins like a readable video container."""
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
    """The names of a canvas and of its tiles, in the tower's order. tiles: empty without names."""

    whole: bytes
    tiles: tuple[bytes, ...] = ()


def name_pixels(pixels: memoryview, image: Image, frames: int) -> bytes:
    """Name a canvas that holds `frames` images, one below another. Canvases that the vision encoder
    cannot distinguish share a name. One image repeated has the same name as the single image.
    """
    size = len(pixels) // frames
    parts = {blake3(pixels[size * k : size * (k + 1)]).digest(): None for k in range(frames)}
    whole = parts if len(parts) == 1 else {blake3(pixels).digest(): None}
    facts = struct.pack(">4I", image.canvas[1], image.num_tokens, image.num_patches, len(parts))
    return blake3(facts + b"".join(whole)).digest()


def encode_array(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode RGB pixels [height, width, 3] in our format, for images from behind the front."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ImageError(
            f"an array must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}"
        )
    height, width, _ = pixels.shape
    return RAW_HEADER.pack(RAW_MAGIC, height, width) + pixels.tobytes()


def encode_image(image: PIL.Image.Image) -> bytes:
    """Encode a Pillow image in our own format. The image is made upright and RGB, with transparency
    laid over white.
    """
    return encode_array(to_rgb(PIL.ImageOps.exif_transpose(image)))


def to_rgb(image: PIL.Image.Image) -> npt.NDArray[np.uint8]:
    """Return RGB pixels [height, width, 3], transparency laid over white. This is what
    transformers' `convert_to_rgb` does.

    Raises ValueError for a mode that Pillow cannot convert.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def read_raw(data: bytes | mmap.mmap) -> Probe:
    """Read the header of our own format. Raises Unreadable if cut short."""
    if len(data) >= RAW_HEADER.size:
        _, height, width = RAW_HEADER.unpack(data[: RAW_HEADER.size])
        if len(data) == RAW_HEADER.size + 3 * height * width:
            return Probe(RAW, height, width, "RGB", 1, 1)
    raise Unreadable("cut array")


def check_pixels(found: Probe, max_pixels: int) -> None:
    """Raise Unreadable if an image has less than one pixel or more than `max_pixels`."""
    pixels = found.height * found.width
    if pixels < 1:
        raise Unreadable("no pixels", found.width, found.height)
    if pixels > max_pixels:
        sizes = found.width, found.height, pixels / 1e6, max_pixels / 1e6
        raise Unreadable("too many pixels", *sizes)
