"""Pixels are bit-identical to the reference over formats, modes, orientations and sizes; the header alone predicts them."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import PIL.Image
import pytest

from saccade.core.family import ImageRules
from saccade.families.qwen_vl.spec import smart_resize
from saccade.intake.content import encode_image, probe, sniff
from saccade.intake.decode import decode_into, turn
from tests.intake.pictures import chunk, decoded, encode, noise, photo, png, resized, with_orientation

RULES = ImageRules(patch=16, merge=2, min_pixels=64 * 64, max_pixels=512 * 512, mean=(0.5,) * 3, std=(0.5,) * 3)
SIZES = [(224, 320), (97, 131), (33, 410), (640, 480), (700, 901), (31, 17)]


def palette(pixels: np.ndarray, transparent: bool = False) -> PIL.Image.Image:
    image = PIL.Image.fromarray(pixels).quantize(64)
    if transparent:
        image.info["transparency"] = 7
    return image


def alpha(pixels: np.ndarray, mode: str) -> PIL.Image.Image:
    image = PIL.Image.fromarray(pixels).convert(mode)
    image.putalpha(PIL.Image.fromarray(noise(*pixels.shape[:2], seed=9)[..., 0]))
    return image


def sixteen_bit(pixels: np.ndarray) -> PIL.Image.Image:
    return PIL.Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + pixels[..., 1])


def frames(pixels: np.ndarray, format: str) -> bytes:
    later = [PIL.Image.fromarray(pixels[::-1].copy()), PIL.Image.fromarray(pixels[:, ::-1].copy())]
    return encode(pixels, format, save_all=True, append_images=later, duration=40)


def late_exif(pixels: np.ndarray) -> bytes:
    """A PNG whose orientation stands after its pixels."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    return png(*pixels.shape[:2], rows, after=chunk(b"eXIf", exif.tobytes()[6:]))


MAKERS: dict[str, Callable[[np.ndarray], bytes]] = {
    "jpeg 4:2:0": lambda p: encode(p, "JPEG", quality=85, subsampling=2),
    "jpeg 4:2:2": lambda p: encode(p, "JPEG", quality=70, subsampling=1),
    "jpeg 4:4:4": lambda p: encode(p, "JPEG", quality=95, subsampling=0),
    "jpeg progressive": lambda p: encode(p, "JPEG", quality=80, progressive=True),
    "jpeg restart markers": lambda p: encode(p, "JPEG", restart_marker_blocks=3),
    "jpeg grey": lambda p: encode(PIL.Image.fromarray(p).convert("L"), "JPEG"),
    "jpeg cmyk": lambda p: encode(PIL.Image.fromarray(p).convert("CMYK"), "JPEG"),
    "jpeg kept as rgb": lambda p: encode(p, "JPEG", keep_rgb=True),
    "png rgb": lambda p: encode(p, "PNG"),
    "png rgba": lambda p: encode(alpha(p, "RGBA"), "PNG"),
    "png grey": lambda p: encode(PIL.Image.fromarray(p).convert("L"), "PNG"),
    "png grey alpha": lambda p: encode(alpha(p, "LA"), "PNG"),
    "png one bit": lambda p: encode(PIL.Image.fromarray(p).convert("1"), "PNG"),
    "png palette": lambda p: encode(palette(p), "PNG"),
    "png palette transparent": lambda p: encode(palette(p, transparent=True), "PNG", transparency=7),
    "png 16 bit grey": lambda p: encode(sixteen_bit(p), "PNG"),
    "png animated": lambda p: frames(p, "PNG"),
    "gif": lambda p: encode(palette(p), "GIF"),
    "gif animated": lambda p: frames(p, "GIF"),
    "gif transparent": lambda p: encode(palette(p, transparent=True), "GIF", transparency=7),
    "webp lossy": lambda p: encode(p, "WEBP", quality=80),
    "webp lossless alpha": lambda p: encode(alpha(p, "RGBA"), "WEBP", lossless=True),
    "webp animated": lambda p: frames(p, "WEBP"),
    "bmp": lambda p: encode(p, "BMP"),
    "tiff": lambda p: encode(p, "TIFF"),
    "tiff lzw cmyk": lambda p: encode(PIL.Image.fromarray(p).convert("CMYK"), "TIFF", compression="tiff_lzw"),
    "tiff float": lambda p: encode(PIL.Image.fromarray(p[..., 0].astype(np.float32)), "TIFF"),
    "avif": lambda p: encode(p, "AVIF", quality=60, speed=10),
    "png late orientation": late_exif,
}
ORIENTED = [(format, orientation) for format in ("JPEG", "PNG", "WEBP", "TIFF") for orientation in range(1, 9)]


def assert_as_reference(data: bytes) -> None:
    found = probe(data, max_pixels=10**8)
    reference = decoded(data)
    assert found.upright == reference.shape[:2]
    for size in (smart_resize(*found.upright, RULES), found.upright):
        target = np.empty((*size, 3), np.uint8)
        decode_into(target, memoryview(data), found.upright, found.orientation)
        np.testing.assert_array_equal(target, resized(reference, size))


@pytest.mark.parametrize("kind", MAKERS)
def test_pixels_are_the_references_for_every_kind_of_file(kind: str) -> None:
    for number, size in enumerate(SIZES):
        assert_as_reference(MAKERS[kind]((photo, noise)[number % 2](*size, seed=number)))


@pytest.mark.parametrize(("format", "orientation"), ORIENTED)
def test_pixels_are_the_references_for_every_orientation(format: str, orientation: int) -> None:
    assert_as_reference(with_orientation(photo(60, 100), orientation, format))
    assert_as_reference(with_orientation(photo(64, 96), orientation, format))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_pixels_equals_exif_transpose(orientation: int) -> None:
    pixels = noise(5, 7)
    np.testing.assert_array_equal(turn(pixels, orientation), decoded(with_orientation(pixels, orientation, "PNG")))


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_resize_does_not_depend_on_memory_layout(channels_last: bool) -> None:
    """torchvision hands over one or the other, depending on where the picture comes from."""
    import torch

    pixels = photo(333, 517)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    image = image.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    result = torch.nn.functional.interpolate(image, (256, 416), mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()
    target = np.empty((256, 416, 3), np.uint8)
    data = encode(pixels)
    decode_into(target, memoryview(data), (333, 517), 1)
    np.testing.assert_array_equal(target, result)


def test_an_object_behind_the_front_keeps_its_pixels() -> None:
    image = PIL.Image.open(io.BytesIO(with_orientation(photo(60, 100), 6, "PNG")))
    data = encode_image(image)
    assert sniff(data) == "RAW"
    target = np.empty((100, 60, 3), np.uint8)
    decode_into(target, memoryview(data), probe(data, 10**6).upright, 1)
    np.testing.assert_array_equal(target, decoded(with_orientation(photo(60, 100), 6, "PNG")))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_file_cut_short_is_an_error(format: str) -> None:
    data = encode(noise(200, 200), format)
    data = data[: len(data) // 2]
    found = probe(data, 10**6)
    with pytest.raises(ValueError):
        decode_into(np.empty((192, 192, 3), np.uint8), memoryview(data), found.upright, found.orientation)
