"""Names and costs without decoding: keys, budgets, and the hostile set, refused from the header
alone.
"""

from __future__ import annotations

import gzip
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec
from saccade.core.recipe import whole
from saccade.core.types import ImageKey
from saccade.media.content import Budget, digest, encode_array, identify
from saccade.media.formats.decode import decode_into
from saccade.media.formats.header import probe
from tests.media.pictures import chunk, encode, noise, photo, png, with_orientation

LIMIT = 178_956_970


def key(spec: FamilySpec, data: bytes, budget: Budget | None = None, salt: str = "") -> ImageKey:
    return identify(digest(data), probe(data, LIMIT), budget or Budget(), salt, spec).image.key


def test_the_same_bytes_have_the_same_key(spec: FamilySpec) -> None:
    data = encode(photo(100, 100))
    assert key(spec, data) == key(spec, bytes(bytearray(data)))


def test_other_bytes_settings_or_salt_have_another_key(spec: FamilySpec) -> None:
    data = encode(photo(100, 100))
    keys = {
        key(spec, data),
        key(spec, data, salt="tenant"),
        key(spec, data, Budget(max_pixels=64 * 64)),
        key(spec, data, Budget(min_pixels=200 * 200)),
        key(spec, encode(photo(100, 100), compress_level=1)),
    }
    assert len(keys) == 5
    assert key(spec, data, Budget(detail="high")) == key(spec, data)
    assert key(spec, data, Budget(detail="low")) == key(spec, data), "of the same size"


def test_a_budget_bounds_the_size_after_resizing(spec: FamilySpec) -> None:
    found = probe(encode(noise(1200, 1600)), LIMIT)
    sizes = [
        identify(bytes(32), found, Budget(max_pixels=most), "", spec).recipe.canvas
        for most in (64 * 64, 512 * 512, None)
    ]
    areas = [height * width for height, width in sizes]
    assert areas[0] <= 64 * 64 < areas[1] <= 512 * 512 < areas[2]
    grown = identify(
        bytes(32), probe(encode(noise(40, 40)), LIMIT), Budget(min_pixels=300 * 300), "", spec
    ).recipe.canvas
    assert grown[0] * grown[1] >= 300 * 300


@pytest.mark.parametrize(
    "budget",
    [
        Budget(max_pixels=10),
        Budget(max_pixels=10**9),
        Budget(min_pixels=0),
        Budget(min_pixels=9000, max_pixels=8000),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(spec: FamilySpec, budget: Budget) -> None:
    with pytest.raises(ImageError, match="_pixels is"):
        budget.apply(spec.pixel_bounds)


def test_rules_without_wishes_are_the_models_own(spec: FamilySpec) -> None:
    assert Budget().apply(spec.pixel_bounds) == spec.pixel_bounds
    low = Budget(detail="low").apply(spec.pixel_bounds)
    assert low == replace(
        spec.pixel_bounds, max_pixels=min(512 * 512, spec.pixel_bounds.max_pixels)
    )


def test_an_aspect_ratio_out_of_bounds_is_refused(spec: FamilySpec) -> None:
    with pytest.raises(ImageError, match="aspect ratio of 300"):
        key(spec, encode(noise(4, 1200)))


def test_orientation_swaps_the_grid(spec: FamilySpec) -> None:
    upright = identify(
        bytes(32), probe(with_orientation(photo(100, 300), 1, "JPEG"), LIMIT), Budget(), "", spec
    )
    turned = identify(
        bytes(32), probe(with_orientation(photo(100, 300), 6, "JPEG"), LIMIT), Budget(), "", spec
    )
    assert upright.image.canvas == turned.image.canvas[::-1]
    assert upright.image.num_tokens == turned.image.num_tokens


def test_arrays_have_keys_by_their_pixels(spec: FamilySpec) -> None:
    pixels = photo(50, 60)
    assert key(spec, encode_array(pixels)) == key(spec, encode_array(np.asfortranarray(pixels)))
    assert key(spec, encode_array(pixels)) != key(spec, encode_array(pixels[::-1]))
    assert key(spec, encode_array(pixels)) != key(spec, encode_array(pixels.reshape(60, 50, 3)))
    with pytest.raises(ImageError, match="uint8"):
        encode_array(pixels.astype(np.float32))


JP2 = b"\0\0\0\x0cjP  \r\n\x87\n"


def bomb(height: int, width: int) -> bytes:
    return png(height, width, bytes(20 * 2**20))


def jpeg_header(height: int, width: int) -> bytes:
    data = encode(noise(16, 16), "JPEG")
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def many_frames() -> bytes:
    """A GIF of 10,000 frames, one pixel each, that say they are 60,000 wide."""
    frame = (
        b"\x21\xf9\x04\x00\x01\x00\x00\x00"
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
        + b"\x02\x02\x44\x01\x00"
    )
    return (
        b"GIF89a"
        + struct.pack("<HH", 60000, 60000)
        + b"\x80\x00\x00"
        + bytes(6)
        + frame * 10_000
        + b";"
    )


def jpeg_of(segments: bytes) -> bytes:
    """A good JPEG of 16 x 16 with more segments at its start."""
    data = encode(noise(16, 16), "JPEG")
    return data[:2] + segments + data[2:]


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def directory(tags: int) -> bytes:
    """A TIFF directory, as in EXIF, of tags whose values are said to lie far behind its end."""
    return (
        b"II*\0\x08\0\0\0"
        + struct.pack("<H", tags)
        + b"".join(struct.pack("<HHII", tag, 2, 10**6, 8) for tag in range(tags))
    )


def webp_with_exif(exif: bytes) -> bytes:
    data = encode(noise(16, 16), "WEBP")
    parts = (b"VP8X", bytes([8, 0, 0, 0, 15, 0, 0, 15, 0, 0])), (b"EXIF", exif)
    return (
        data[:12]
        + b"".join(kind + struct.pack("<I", len(part)) + part for kind, part in parts)
        + data[12:]
    )


def avif_of_items(count: int) -> bytes:
    """An AVIF whose `meta` box names many items."""
    items = b"".join(struct.pack(">HHH", number + 1, 0, 0) for number in range(count))
    location = b"iloc" + bytes(6) + struct.pack(">H", count) + items
    inner = bytes(4) + struct.pack(">I", len(location) + 4) + location
    start = encode(noise(16, 16), "AVIF")
    return (
        start[: int.from_bytes(start[:4], "big")]
        + struct.pack(">I", len(inner) + 8)
        + b"meta"
        + inner
    )


def avif_of_boxes(count: int) -> bytes:
    data = encode(noise(16, 16), "AVIF")
    start = int.from_bytes(data[:4], "big")
    return data[:start] + (struct.pack(">I", 8) + b"free") * count + data[start:]


def tiff_of_entries(count: int) -> bytes:
    """A directory of width, height, and the same private tag again and again."""
    entries = ((256, 3, 1, 16), (257, 3, 1, 16), *((65_000, 3, 1, 0),) * (count - 2))
    return (
        b"II*\0\x08\0\0\0"
        + struct.pack("<H", count)
        + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    )


def heic_of_size(width: int, height: int) -> bytes:
    """A HEIC of 64 x 64 px that says it is larger."""
    data = encode(noise(64, 64), "HEIF")
    return data.replace(
        b"ispe" + struct.pack(">III", 0, 64, 64), b"ispe" + struct.pack(">III", 0, width, height)
    )


def jpeg_2000_of_size(width: int, height: int, wrapped: bool) -> bytes:
    """A JPEG 2000 of 64 x 64 px whose codestream says that it is larger, as its tile does."""
    data = bytearray(encode(noise(64, 64), "JPEG2000", no_jp2=not wrapped))
    at = data.index(b"\xff\x4f\xff\x51")
    data[at + 8 : at + 16] = data[at + 24 : at + 32] = struct.pack(">II", width, height)
    return bytes(data)


def icon_of(png: bytes) -> bytes:
    """An icon that its directory calls 16 x 16."""
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(png), 22) + png


def tiff_of_one_strip(nbytes: int, big: bool) -> bytes:
    """A TIFF of 16 x 16 px whose only strip is said to have so many bytes."""
    data = encode(noise(16, 16), "TIFF", compression="tiff_lzw", big_tiff=big)
    at = data.index(struct.pack("<H", 279), 16)  # the tag, its type and count, then its value
    kind = struct.pack("<HQ" if big else "<HI", 4, 1)
    return data[: at + 2] + kind + struct.pack("<I", nbytes) + data[at + 6 + len(kind) :]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "text": (b"hello, is this a picture?", "text"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="10"/>', "SVG"),
    "pdf": (b"%PDF-1.7\n", "PDF"),
    "heic of a header alone": (b"\x00\x00\x00\x18ftypheic" + bytes(100), "cut short"),
    "heic cut": (encode(noise(64, 64), "HEIF")[:300], "cut short"),
    "heic 60,000 x 60,000": (heic_of_size(60_000, 60_000), "60000 x 60000 px|cut short"),
    "heif of another codec": (b"\x00\x00\x00\x14ftypmif1\0\0\0\0jpeg" + bytes(100), "HEIF"),
    "rubbish": (bytes(range(128, 256)), "unknown format"),
    "jpeg magic only": (b"\xff\xd8\xff", "cut short"),
    "jpeg header cut": (encode(noise(64, 64), "JPEG")[:100], "cut short"),
    "png header cut": (encode(noise(64, 64))[:20], "cut short"),
    "webp header cut": (encode(noise(64, 64), "WEBP")[:22], "cut short"),
    "tiff header cut": (encode(noise(64, 64), "TIFF")[:9], "cut short"),
    "gif header cut": (encode(noise(64, 64), "GIF")[:12], "cut short"),
    "bmp header cut": (encode(noise(64, 64), "BMP")[:20], "cut short"),
    "raw cut": (encode_array(noise(64, 64))[:-1], "cut short"),
    "png 50,000 x 50,000": (
        png(50_000, 50_000, b""),
        r"50000 x 50000 px \(2500 Mpx\); the limit is 179 Mpx.*--max-image-pixels",
    ),
    "jpeg 50,000 x 50,000": (jpeg_header(50_000, 50_000), "50000 x 50000 px"),
    "bomb": (bomb(40_000, 40_000), "40000 x 40000 px"),
    "no height": (jpeg_header(0, 100), "cut short|it has no pixels"),
    "gif 10,000 frames": (many_frames(), "60000 x 60000 px"),
    "jpeg of padding": (b"\xff\xd8" + b"\xff" * 2**22, "cut short"),
    "jpeg of frames": (
        jpeg_of(segment(0xC0, b"\x08\0\x10\0\x10\x03" + bytes(65_000)) * 500),
        "cut short",
    ),
    "jpeg 2000 header cut": (encode(noise(64, 64), "JPEG2000")[:50], "cut short"),
    "jpeg 2000 codestream cut": (b"\xff\x4f\xff\x51\0\x2f", "cut short"),
    "jpeg 2000 60,000 x 60,000": (jpeg_2000_of_size(60_000, 60_000, False), "60000 x 60000 px"),
    "jpeg 2000 of two sizes": (jpeg_2000_of_size(60_000, 60_000, True), "damaged"),
    "jpeg 2000 of boxes": (JP2 + struct.pack(">I4s", 8, b"free") * 2**18, "damaged"),
    "jpeg 2000 of endless boxes": (JP2 + struct.pack(">I4s", 2, b"free") * 9, "damaged"),
    "ico of a bomb": (icon_of(bomb(40_000, 40_000)), "40000 x 40000 px"),
    "ico of nothing": (b"\0\0\1\0\1\0" + bytes(16), "damaged|it has no pixels"),
    "ico cut": (encode(noise(64, 64), "ICO")[:20], "damaged"),
    "ppm 60,000 x 60,000": (b"P6 60000 60000 255\n", "60000 x 60000 px"),
    "ppm of a comment": (b"P6\n#" + bytes(2**22), "damaged"),
    "ppm of no size": (b"P6\n# hello\n", "damaged"),
    "a text about P6": (b"P6 is a format", "text"),
    "tiff of 64 bits cut": (encode(noise(64, 64), "TIFF", big_tiff=True)[:12], "cut short"),
    "gzip": (gzip.compress(b"picture"), "gzip-compressed"),
    "avif of 60,000 items": (avif_of_items(60_000), "cut short"),
    "gif of comments": (b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01 " * 2**21, "cut short"),
}


BLOATED = {
    "jpeg of exif": jpeg_of(segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 900),
    "jpeg of small exif": jpeg_of(segment(0xE1, b"Exif\0\0" + bytes(1000)) * 30_000),
    "png of exif": png(16, 16, b"", before=chunk(b"eXIf", directory(60_000)) * 20),
    "png of text bombs": png(
        16, 16, b"", before=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**25), 9)) * 80
    ),
    "tiff of 65,535 entries": tiff_of_entries(65_535),
    "avif of 32,000 boxes": avif_of_boxes(32_000),
    "webp with exif": webp_with_exif(directory(60_000)),
}


MAX_CALLS = 150_000
"""Of functions, for a header: some tenths of a second."""


@contextmanager
def few_calls() -> Iterator[None]:
    """Within, few functions are called, and nothing is decompressed."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            calls[called.__name__ if event == "c_call" else frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert calls.total() < MAX_CALLS and not calls["decompress"], calls.most_common(9)


@pytest.mark.parametrize("name", BLOATED)
def test_a_picture_with_more_notes_than_pixels_is_read_as_quickly(name: str) -> None:
    with few_calls():
        assert probe(BLOATED[name], LIMIT).upright == (16, 16)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_from_the_header(name: str) -> None:
    data, expected = HOSTILE[name]
    with few_calls(), pytest.raises(ImageError, match=expected):
        probe(data, LIMIT)


@pytest.mark.parametrize("big", [False, True])
def test_a_strip_that_claims_gigabytes_is_refused_or_read(big: bool) -> None:
    """libtiff believes no more bytes than the file has."""
    data = tiff_of_one_strip(0xF000_0000, big)
    found = probe(data, LIMIT)
    assert found.upright == (16, 16)
    canvas = np.empty((16, 16, 3), np.uint8)
    with suppress(ValueError):
        decode_into([(canvas, whole((16, 16)))], memoryview(data), (16, 16), 1)
        np.testing.assert_array_equal(canvas, noise(16, 16))


@pytest.mark.parametrize("height", [40, -40])
def test_an_icon_has_the_size_that_stands_in_it(height: int) -> None:
    """A directory has a byte for each side, and may be wrong."""
    assert probe(icon_of(png(300, 400, b"")), LIMIT).upright == (300, 400)
    bitmap = struct.pack("<IiiHHI", 40, 50, 2 * height, 1, 32, 0) + bytes(16 + 4 * 50 * 40)
    assert probe(icon_of(bitmap), LIMIT).upright == (40, 50)


def test_only_the_header_is_read() -> None:
    """10,000 frames of a modest size, and a bomb within the limit, cost their header: decoding is
    someone else's risk.
    """
    gif = many_frames().replace(struct.pack("<HH", 60000, 60000), struct.pack("<HH", 600, 600), 1)
    assert (probe(gif, LIMIT).height, probe(gif, LIMIT).frames) == (600, None)
    assert probe(bomb(13_000, 13_000), LIMIT).upright == (13_000, 13_000)
    late = chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, 0))
    assert probe(png(300, 300, b"", after=late), LIMIT).upright == (300, 300)
    many_chunks = png(10, 10, b"", before=chunk(b"tEXt", b"") * 200_000)
    with few_calls():
        assert probe(many_chunks, LIMIT).upright == (10, 10)


def test_heic_without_its_extra_is_refused_by_the_extras_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saccade.media.formats.header.READS_HEIC", False)
    with pytest.raises(ImageError, match=r"HEIC.*operator.*scripts/install\.py '\.\[heic\]'"):
        probe(encode(noise(64, 64), "HEIF"), LIMIT)


def test_edges_bound_only_images_of_models_whose_processors_call_their_bounds_so(
    spec: FamilySpec,
) -> None:
    bounds = spec.pixel_bounds
    budget = Budget(max_pixels=bounds.max_pixels, as_edges=True)
    assert budget.apply(replace(bounds, as_edges=True)).max_pixels == bounds.max_pixels
    with pytest.raises(ImageError, match=r"mm_processor_kwargs\.size: .*max_pixels"):
        budget.apply(replace(bounds, as_edges=False))
