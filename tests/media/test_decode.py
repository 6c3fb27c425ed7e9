"""Pixels are bit-identical to the reference over formats, modes, orientations and sizes; the header
alone predicts them.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from itertools import product

import numpy as np
import PIL.Image
import pytest

from saccade.core.recipe import whole
from saccade.families.kit.native_images import ImageRules, smart_resize
from saccade.media.formats.decode import Target, _decode_png, decode, decode_into, turn
from saccade.media.formats.header import probe
from saccade.media.formats.pixel_operations import Pixels
from saccade.media.pillow_images import encode_image
from tests.helpers.breadth import broad
from tests.media.pictures import (
    chunk,
    decoded,
    encode,
    noise,
    photo,
    png,
    resized,
    with_orientation,
)

RULES = ImageRules(
    patch=16, merge=2, min_pixels=64 * 64, max_pixels=256 * 256, mean=(0.5,) * 3, std=(0.5,) * 3
)
SIZES = [(112, 160), (97, 131), (33, 410), (320, 240), (350, 451), (31, 17)]


def on_canvas(target: Pixels) -> Target:
    """A canvas on which the whole image is to lie."""
    return target, whole((target.shape[0], target.shape[1]))


def palette(pixels: np.ndarray, transparent: bool = False) -> PIL.Image.Image:
    image = PIL.Image.fromarray(pixels).quantize(64)
    if transparent:
        image.info["transparency"] = 7
    return image


def alpha(pixels: np.ndarray, mode: str) -> PIL.Image.Image:
    height, width = pixels.shape[:2]
    image = PIL.Image.fromarray(pixels).convert(mode)
    image.putalpha(PIL.Image.fromarray(noise(height, width, seed=9)[..., 0]))
    return image


def sixteen_bit(pixels: np.ndarray) -> PIL.Image.Image:
    return PIL.Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + pixels[..., 1])


def lab(pixels: np.ndarray) -> PIL.Image.Image:
    height, width = pixels.shape[:2]
    return PIL.Image.frombytes("LAB", (width, height), pixels.tobytes())


def netpbm(pixels: np.ndarray, magic: bytes, largest: int | None, body: bytes) -> bytes:
    height, width = pixels.shape[:2]
    head = b"%s\n# a comment\n%d %d\n" % (magic, width, height)
    return head + (b"" if largest is None else b"%d\n" % largest) + body


def text(values: np.ndarray) -> bytes:
    """Numbers and comments."""
    words = " ".join(map(str, values.ravel().tolist()))
    return words.replace("7 ", "7 #12 x\n ").encode()


def frames(pixels: np.ndarray, format: str) -> bytes:
    later = [PIL.Image.fromarray(pixels[::-1].copy()), PIL.Image.fromarray(pixels[:, ::-1].copy())]
    return encode(pixels, format, save_all=True, append_images=later, duration=40)


def late_exif(pixels: np.ndarray) -> bytes:
    """A PNG whose orientation stands after its pixels."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    height, width = pixels.shape[:2]
    return png(height, width, rows, after=chunk(b"eXIf", exif.tobytes()[6:]))


def rows(pixels: np.ndarray, filter: int = 0) -> bytes:
    return b"".join(bytes([filter]) + row.tobytes() for row in pixels)


def every_filter(pixels: np.ndarray) -> bytes:
    """Rows say that they are filtered in turn by each of the five; whatever bytes follow, they mean
    some picture.
    """
    lines = (bytes([number % 5]) + row.tobytes() for number, row in enumerate(pixels))
    height, width = pixels.shape[:2]
    return png(height, width, b"".join(lines))


def between_chunks(pixels: np.ndarray) -> bytes:
    """Chunks that say how to show the pixels do not change them; one of them would bring down old
    decoders.
    """
    before = (
        chunk(b"gAMA", (22_222).to_bytes(4, "big"))
        + chunk(b"tRNS", bytes(6))
        + chunk(b"sBIT", b"\5\5\5")
        + chunk(b"eXIf", b"")
    )
    height, width = pixels.shape[:2]
    return png(height, width, rows(pixels), before=before, after=chunk(b"tEXt", b"Comment\0later"))


def in_parts(data: bytes) -> bytes:
    """The same PNG with its pixels cut into chunks of 100 bytes."""
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    parts, at = [], start
    while at < end:
        length = int.from_bytes(data[at : at + 4], "big")
        parts.append(data[at + 8 : at + 8 + length])
        at += 12 + length
    body = b"".join(parts)
    return (
        data[:start]
        + b"".join(chunk(b"IDAT", body[at : at + 100]) for at in range(0, len(body), 100))
        + data[end:]
    )


def interlaced(pixels: np.ndarray) -> bytes:
    """In Adam7's seven passes."""
    passes = (
        (0, 8, 0, 8),
        (0, 8, 4, 8),
        (4, 8, 0, 4),
        (0, 4, 2, 4),
        (2, 4, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 1),
    )
    parts = [
        rows(pixels[top::down, left::right])
        for top, down, left, right in passes
        if pixels.shape[1] > left
    ]
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 1)
    body = chunk(b"IDAT", zlib.compress(b"".join(parts)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


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
    "png rgb of every filter": every_filter,
    "png rgb between other chunks": between_chunks,
    "png rgb in many parts": lambda p: in_parts(encode(p, "PNG")),
    "png rgb interlaced": interlaced,
    "png grey": lambda p: encode(PIL.Image.fromarray(p).convert("L"), "PNG"),
    "png grey alpha": lambda p: encode(alpha(p, "LA"), "PNG"),
    "png one bit": lambda p: encode(PIL.Image.fromarray(p).convert("1"), "PNG"),
    "png palette": lambda p: encode(palette(p), "PNG"),
    "png palette transparent": lambda p: encode(
        palette(p, transparent=True), "PNG", transparency=7
    ),
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
    "tiff lzw cmyk": lambda p: encode(
        PIL.Image.fromarray(p).convert("CMYK"), "TIFF", compression="tiff_lzw"
    ),
    "tiff float": lambda p: encode(PIL.Image.fromarray(p[..., 0].astype(np.float32)), "TIFF"),
    "avif": lambda p: encode(p, "AVIF", quality=60, speed=10),
    "png late orientation": late_exif,
    "tiff lab": lambda p: encode(lab(p), "TIFF"),
    "tiff of 64 bits": lambda p: encode(p, "TIFF", big_tiff=True),
    "tiff of 64 bits lzw alpha": lambda p: encode(
        alpha(p, "RGBA"), "TIFF", big_tiff=True, compression="tiff_lzw"
    ),
    "jpeg 2000": lambda p: encode(p, "JPEG2000"),
    "jpeg 2000 lossy": lambda p: encode(p, "JPEG2000", irreversible=True, quality_layers=[20]),
    "jpeg 2000 codestream": lambda p: encode(p, "JPEG2000", no_jp2=True),
    "jpeg 2000 tiles": lambda p: encode(p, "JPEG2000", tile_size=(32, 32)),
    "jpeg 2000 alpha": lambda p: encode(alpha(p, "RGBA"), "JPEG2000"),
    "jpeg 2000 grey": lambda p: encode(PIL.Image.fromarray(p).convert("L"), "JPEG2000"),
    "jpeg 2000 16 bit grey": lambda p: encode(sixteen_bit(p), "JPEG2000"),
    "ico": lambda p: encode(alpha(p, "RGBA"), "ICO"),
    "ico of bitmaps": lambda p: encode(alpha(p, "RGBA"), "ICO", bitmap_format="bmp"),
    "ico of two colours": lambda p: encode(
        PIL.Image.fromarray(p).convert("1"), "ICO", bitmap_format="bmp"
    ),
    "ppm": lambda p: encode(p, "PPM"),
    "pbm": lambda p: encode(PIL.Image.fromarray(p).convert("1"), "PPM"),
    "pgm 16 bit": lambda p: encode(sixteen_bit(p).convert("I"), "PPM"),
    "pfm": lambda p: encode(PIL.Image.fromarray(p[..., 0].astype(np.float32)), "PPM"),
    "ppm up to 200": lambda p: netpbm(p, b"P6", 200, (p // 2 + 90).tobytes()),
    "ppm up to 1000": lambda p: netpbm(p, b"P6", 1000, p.astype(">u2").tobytes()),
    "pgm up to 1000": lambda p: netpbm(p, b"P5", 1000, p[..., 0].astype(">u2").tobytes()),
    "ppm as text": lambda p: netpbm(p, b"P3", 300, text(p)),
    "pgm as text up to 4000": lambda p: netpbm(p, b"P2", 4000, text(p[..., 0])),
    "pbm as text": lambda p: netpbm(p, b"P1", None, text(p[..., 0] // 128).replace(b" 1", b"1")),
    "heic": lambda p: encode(p, "HEIF", quality=70),
    "heic 4:4:4": lambda p: encode(p, "HEIF", quality=90, chroma=444),
    "heic alpha": lambda p: encode(alpha(p, "RGBA"), "HEIF"),
    "heic of tiles": lambda p: encode(p, "HEIF", tile_size=64),
}
ORIENTED = ("JPEG", "PNG", "WEBP", "TIFF", "HEIF")


PARTS = 3
"""Of the sizes: by default each kind has one of them."""
BY_PARTS = broad(
    product(MAKERS, range(PARTS)), keep=[(kind, at % PARTS) for at, kind in enumerate(MAKERS)]
)


def assert_as_reference(data: bytes) -> None:
    found = probe(data, max_pixels=10**8)
    reference = decoded(data)
    assert found.upright == reference.shape[:2]
    for size in (smart_resize(*found.upright, RULES), found.upright):
        target = np.empty((*size, 3), np.uint8)
        decode_into([on_canvas(target)], memoryview(data), found.upright, found.orientation)
        np.testing.assert_array_equal(target, resized(reference, size))


@pytest.mark.first
@pytest.mark.parametrize(("kind", "part"), BY_PARTS)
def test_pixels_are_the_references_for_every_kind_of_file(kind: str, part: int) -> None:
    for number, size in [*enumerate(SIZES)][part::PARTS]:
        assert_as_reference(MAKERS[kind]((photo, noise)[number % 2](*size, seed=number)))


@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_the_references_for_every_orientation(format: str, orientation: int) -> None:
    assert_as_reference(with_orientation(photo(60, 100), orientation, format))
    assert_as_reference(with_orientation(photo(64, 96), orientation, format))


@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_strips_change_no_pixel(
    format: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is turned, converted and resized by strips of some rows; here, of few."""
    monkeypatch.setattr("saccade.media.formats.decode.STRIP_PIXELS", 700)
    assert_as_reference(with_orientation(photo(110, 173), orientation, format))


@pytest.mark.first
@pytest.mark.parametrize(("kind", "part"), BY_PARTS)
def test_strips_change_no_pixel_of_any_kind(
    kind: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.media.formats.decode.STRIP_PIXELS", 2000)
    for number, size in [*enumerate(SIZES)][part::PARTS]:
        assert_as_reference(MAKERS[kind](photo(*size, seed=number)))


def test_one_decode_writes_all_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.media.formats.decode.STRIP_PIXELS", 2000)
    data = encode(photo(120, 200), "WEBP")
    sizes = [(64, 96), (120, 200), (32, 200), (120, 32), (256, 320)]
    targets = [np.empty((*size, 3), np.uint8) for size in sizes]
    decode_into([on_canvas(target) for target in targets], memoryview(data), (120, 200), 1)
    for target, size in zip(targets, sizes, strict=True):
        np.testing.assert_array_equal(target, resized(decoded(data), size))


def colour_key(pixels: np.ndarray, mode: str) -> PIL.Image.Image:
    """Opaque but for one colour."""
    image = PIL.Image.fromarray(pixels // 64 * 64).convert(mode)
    image.info["transparency"] = image.getpixel((3, 3))
    return image


TRANSPARENT: dict[str, Callable[[np.ndarray], PIL.Image.Image]] = {
    "RGBA": lambda p: alpha(p, "RGBA"),
    "LA": lambda p: alpha(p, "LA"),
    "PA": lambda p: alpha(p, "RGBA").convert("PA"),
    "palette": lambda p: palette(p, transparent=True),
    "RGB colour key": lambda p: colour_key(p, "RGB"),
    "grey key": lambda p: colour_key(p, "L"),
    "opaque": PIL.Image.fromarray,
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_transparency_is_laid_over_white_as_the_references_processor_does(kind: str) -> None:
    """A file of bytes and an object in Python: both give the pixels that transformers makes of the
    PIL image, here of a size that needs no resizing.
    """
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from saccade.kernels.reference.patchify import patchify

    image = TRANSPARENT[kind](photo(96, 128))
    size = {"shortest_edge": RULES.min_pixels, "longest_edge": RULES.max_pixels}
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, size=size, do_rescale=False, do_normalize=False
    )
    wanted = processor(images=[image], return_tensors="pt")["pixel_values"].float()
    saved = {"transparency": image.info["transparency"]} if "transparency" in image.info else {}
    ways = [encode_image(image)]
    if kind != "PA":  # no format has it
        ways.append(encode(image, "PNG", **saved))
    for data in ways:
        target = np.empty((96, 128, 3), np.uint8)
        decode_into([on_canvas(target)], memoryview(data), (96, 128), 1)
        found = patchify(
            torch.from_numpy(target), 16, 2, 2, torch.zeros(3), torch.ones(3), torch.float32
        )
        assert torch.equal(found, wanted)


def test_a_heic_of_several_images_is_its_primary_one() -> None:
    shown, other = photo(96, 128), noise(64, 64)
    several = {"save_all": True, "append_images": [PIL.Image.fromarray(shown)], "quality": 90}
    data = encode(other, "HEIF", primary_index=1, **several)
    assert probe(data, 10**9).upright == (96, 128)
    size, strips = decode(memoryview(data), 1)
    assert size == (96, 128)
    assert np.abs(strips(0, 96).astype(int) - shown).mean() < 6


def test_black_strokes_on_transparency_stay_visible() -> None:
    image = PIL.Image.new("RGBA", (64, 64))
    image.paste((0, 0, 0, 255), (16, 16, 48, 48))
    target = np.empty((64, 64, 3), np.uint8)
    decode_into([on_canvas(target)], memoryview(encode(image)), (64, 64), 1)
    assert (target[0, 0].tolist(), target[32, 32].tolist()) == ([255] * 3, [0] * 3)


@pytest.mark.parametrize(
    ("magic", "body", "words"),
    [
        (b"P3", b"1 2 3 4 5", "truncated"),
        (b"P3", b"1 2 3 4 5 6 7 8 9 10 11 256", "damaged"),
        (b"P3", b"1 2 3 4 5 6 7 8 9 10 11 -1", "damaged"),
        (b"P2", b"1 2 3 99999999999999999999", "damaged"),
        (b"P2", b"1 2 x 4", "damaged"),
        (b"P2", b"", "truncated"),
        (b"P6", b"123", "truncated"),
    ],
)
def test_a_damaged_netpbm_says_so(magic: bytes, body: bytes, words: str) -> None:
    data = netpbm(noise(2, 2), magic, 255, body)
    with pytest.raises(ValueError, match=words):
        decode(memoryview(data), 1)
    with pytest.raises((ValueError, OSError)):
        decoded(data)


def test_words_of_a_netpbm_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.media.formats.netpbm.PART", 5)
    assert_as_reference(netpbm(noise(4, 5), b"P3", 255, text(noise(4, 5, seed=1))))
    assert_as_reference(netpbm(noise(4, 5), b"P3", 255, text(noise(4, 5, seed=2)) + b" P3 5 4"))


def test_a_jpeg_of_hundreds_of_scans_is_refused() -> None:
    """One of the usual ten is not, nor one with a film behind its end."""
    data = encode(photo(64, 64), "JPEG", progressive=True)
    scan, end = data.index(b"\xff\xda"), data.rindex(b"\xff\xd9")
    last = data.rindex(b"\xff\xda")
    many = data[:end] + data[last:end] * 300 + data[end:]
    assert scan < last
    with pytest.raises(ValueError, match="more than 100 scans"):
        decode(memoryview(many), 1)
    for good in (data, data + b"\xff\xda" * 1000):
        np.testing.assert_array_equal(upright(good), decoded(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_pixels_equals_exif_transpose(orientation: int) -> None:
    pixels = noise(5, 7)
    np.testing.assert_array_equal(
        turn(pixels, orientation), decoded(with_orientation(pixels, orientation, "PNG"))
    )


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_resize_does_not_depend_on_memory_layout(channels_last: bool) -> None:
    """torchvision hands over one or the other, depending on where the picture comes from."""
    import torch

    pixels = photo(333, 517)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    image = image.contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    result = (
        torch.nn.functional.interpolate(image, (256, 416), mode="bicubic", antialias=True)[0]
        .permute(1, 2, 0)
        .numpy()
    )
    target = np.empty((256, 416, 3), np.uint8)
    data = encode(pixels)
    decode_into([on_canvas(target)], memoryview(data), (333, 517), 1)
    np.testing.assert_array_equal(target, result)


def test_an_object_behind_the_front_keeps_its_pixels() -> None:
    image = PIL.Image.open(io.BytesIO(with_orientation(photo(60, 100), 6, "PNG")))
    data = encode_image(image)
    assert probe(data, 10**6).format == "RAW"
    target = np.empty((100, 60, 3), np.uint8)
    decode_into([on_canvas(target)], memoryview(data), probe(data, 10**6).upright, 1)
    np.testing.assert_array_equal(target, decoded(with_orientation(photo(60, 100), 6, "PNG")))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "PNG header"])
def test_a_file_cut_short_is_an_error(format: str) -> None:
    data = encode(noise(200, 200), format.split()[0])
    data = data[: 33 if "header" in format else len(data) // 2]
    found = probe(data, 10**6)
    with pytest.raises(ValueError, match=r"^(?!.*object at)"):
        decode_into(
            [on_canvas(np.empty((192, 192, 3), np.uint8))],
            memoryview(data),
            found.upright,
            found.orientation,
        )


@pytest.mark.parametrize("kind", MAKERS)
def test_the_faster_png_decoder_takes_plain_rgb_and_rgba_only(kind: str) -> None:
    found = _decode_png(memoryview(MAKERS[kind](photo(40, 60))))
    plain = {
        "png rgb",
        "png rgba",
        "png rgb of every filter",
        "png rgb in many parts",
        "png late orientation",
    }
    assert (found is not None) == (kind in plain)


@pytest.mark.parametrize("kind", ["png rgb between other chunks", "png rgba"])
def test_a_damaged_png_is_what_pillow_makes_of_it(kind: str) -> None:
    """A byte changed anywhere: the same pixels, or the same refusal.

    (Only what is wrong in notes beside the pixels may not matter.)
    """
    data = MAKERS[kind](noise(9, 11))
    notes = {
        at
        for name in (b"gAMA", b"tRNS", b"sBIT", b"eXIf", b"tEXt")
        if name in data
        for at in around(data, name)
    }
    refused = 0
    for at in range(8, len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :]
        try:
            expected = decoded(changed)
        except Exception:
            refused += 1
            if at not in notes:
                with pytest.raises(ValueError):
                    upright(changed)
        else:
            np.testing.assert_array_equal(upright(changed), expected)
    assert refused > 300, "most bytes matter"


def upright(data: bytes) -> np.ndarray:
    (height, _), strips = decode(memoryview(data), 1)
    return strips(0, height)


def around(data: bytes, name: bytes) -> range:
    """The place of a whole chunk."""
    at = data.index(name) - 4
    return range(at, at + 12 + int.from_bytes(data[at : at + 4], "big"))
