"""The path of a picture: opened without decoding, decoded once, handed over by key; its bytes kept
while a request needs them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path as FilePath

import numpy as np
import PIL.Image
import pytest

from saccade.core.errors import ImageError, InvalidRequest, TooLarge
from saccade.core.plan import PixelSlot
from saccade.media.content import Budget
from saccade.media.media import Media
from saccade.media.opened import OpenedImage
from saccade.media.sources.source import ImageSource, source_from_object
from tests.helpers.images import data_url
from tests.media.conftest import MakePath
from tests.media.pictures import decoded, encode, noise, photo, resized


def source(
    data: bytes, param: str = "messages[0].content[0]", budget: Budget | None = None
) -> ImageSource:
    url = data_url(data)
    return ImageSource(url, param, budget or Budget())


async def ready(media: Media, data: bytes, salt: str = "") -> OpenedImage:
    picture = await media.open(source(data), salt)
    media.hold_image(picture)
    return picture


async def into_slot(media: Media, picture: OpenedImage, offset: int = 0) -> PixelSlot:
    """Decode a held picture."""
    slot = PixelSlot(offset, *picture.image.canvas)
    await media.decode(picture.image.key, slot)
    return slot


async def test_a_picture_travels_from_url_to_pixels(media_path: MakePath) -> None:
    data = encode(photo(200, 300), "JPEG")
    async with media_path() as path:
        picture = await ready(path.media, data)
        assert (picture.image.canvas, picture.image.grid, picture.image.num_tokens) == (
            (192, 288),
            (1, 12, 18),
            54,
        )
        slot = PixelSlot(8192, *picture.image.canvas)
        await path.media.decode(picture.image.key, slot)
        np.testing.assert_array_equal(path.arena.view(slot), resized(decoded(data), (192, 288)))
        assert path.metrics.value("saccade_images_received_total") == 1
        assert path.metrics.value("saccade_images_decoded_total") == 1
        assert path.metrics.value("saccade_image_bytes_shipped_total") == 192 * 288 * 3
        assert path.media.spent(picture.image.key).decode_ms > 0
        path.media.release_image(picture)
        assert path.media.held == 0


async def test_opening_decodes_nothing(media_path: MakePath) -> None:
    async with media_path() as path:
        await path.media.open_all([source(encode(noise(50, 50, seed))) for seed in range(5)], "")
        assert path.metrics.value("saccade_images_decoded_total") == 0


async def test_a_picture_that_many_hold_is_decoded_once_per_ask(media_path: MakePath) -> None:
    async with media_path() as path:
        data = encode(noise(100, 100))
        pictures = [await ready(path.media, data) for _ in range(16)]
        for picture in pictures[1:]:
            path.media.release_image(picture)
        await into_slot(path.media, pictures[0])
        assert path.metrics.value("saccade_images_decoded_total") == 1


async def test_tenants_and_settings_share_nothing(media_path: MakePath) -> None:
    async with media_path() as path:
        data = encode(noise(300, 300))
        opened = [
            await path.media.open(source(data), "one"),
            await path.media.open(source(data), "other"),
            await path.media.open(source(data, budget=Budget(max_pixels=64 * 64)), "one"),
        ]
        for picture in opened:
            path.media.hold_image(picture)
        await asyncio.gather(
            *(into_slot(path.media, p, 1 << 20 << i) for i, p in enumerate(opened))
        )
        assert len({picture.image.key for picture in opened}) == 3
        assert path.metrics.value("saccade_images_decoded_total") == 3


async def test_a_decode_that_is_called_off_ends_and_the_next_begins(media_path: MakePath) -> None:
    async with media_path() as path:
        picture = await ready(path.media, encode(noise(100, 100)))
        other = await ready(path.media, encode(noise(100, 100, seed=1)))
        asked = asyncio.create_task(into_slot(path.media, picture))
        await asyncio.sleep(0)
        path.media.call_off(picture.image.key)
        with pytest.raises(asyncio.CancelledError):
            await asked
        path.media.call_off(picture.image.key)
        await into_slot(path.media, other)
        assert path.metrics.value("saccade_images_decoded_total") == 1
        path.media.release_image(picture)
        with pytest.raises(ImageError, match="has finished"):
            await into_slot(path.media, picture)


async def test_a_failure_is_told_and_not_remembered(media_path: MakePath) -> None:
    async with media_path() as path:
        data = encode(noise(200, 200), "JPEG")
        picture = await ready(path.media, data[: len(data) // 2])
        for _ in range(2):
            with pytest.raises(ImageError, match=r"cannot be decoded: .*truncated"):
                await into_slot(path.media, picture)
        assert path.metrics.value("saccade_image_worker_restarts_total") == 0
        await into_slot(path.media, await ready(path.media, data))


async def test_errors_name_the_part_of_the_request(media_path: MakePath) -> None:
    good, bad = (
        source(encode(noise(10, 10)), "messages[0].content[0]"),
        source(b"<svg/>", "messages[2].content[1]"),
    )
    async with media_path(
        arena_bytes=1 << 16, max_images_per_request=9000, max_image_bytes=10_000
    ) as path:
        with pytest.raises(ImageError, match="SVG") as raised:
            await path.media.open_all([good, bad], "")
        assert raised.value.param == "messages[2].content[1]"
        with pytest.raises(
            InvalidRequest, match=r"10000 images; the limit is 9000.*--max-images-per-request"
        ):
            await path.media.open_all([good] * 10_000, "")
        with pytest.raises(ImageError, match=r"320 x 320 px.*--tune arena_mb"):
            await path.media.open(source(encode(PIL.Image.new("L", (320, 320)))), "")
        with pytest.raises(TooLarge, match="--tune max_image_bytes") as large:
            await path.media.open(source(encode(noise(100, 100))), "")
        assert (large.value.status, large.value.param) == (413, "messages[0].content[0]")


async def test_objects_behind_the_front_become_pictures(
    media_path: MakePath, tmp_path: FilePath
) -> None:
    pixels = photo(64, 96)
    (tmp_path / "a.png").write_bytes(encode(pixels))
    objects: list[object] = [
        pixels,
        PIL.Image.fromarray(pixels),
        tmp_path / "a.png",
        encode(pixels),
    ]
    async with media_path() as path:
        keys = []
        for thing in objects:
            picture = await path.media.open(source_from_object(thing, "messages[0].content[0]"), "")
            path.media.hold_image(picture)
            keys.append(picture.image.key)
            slot = await into_slot(path.media, picture)
            np.testing.assert_array_equal(path.arena.view(slot), pixels)
        assert keys[0] == keys[1]
        assert keys[2] == keys[3]
    for thing in (3, tmp_path / "b.png"):
        with pytest.raises(ImageError, match=r"must be bytes|cannot be read"):
            source_from_object(thing, "messages[0].content[0]")


@pytest.mark.more
async def test_a_picture_beyond_the_memory_of_image_workers_is_refused_before_decoding(
    media_path: MakePath,
) -> None:
    """A few kB that decoding would swell to gigabytes: told at once, with the option to change."""
    swollen = encode(PIL.Image.new("RGB", (4000, 4000)), "WEBP", lossless=True)
    assert len(swollen) < 10_000
    async with media_path(decode_memory_mb=256) as path:
        with pytest.raises(
            ImageError,
            match=r"WEBP of 4000 x 4000 px.*image workers is 256 MiB.*--tune decode_memory_mb",
        ) as raised:
            await path.media.open(source(swollen, "messages[0].content[1]"), "")
        assert raised.value.param == "messages[0].content[1]"
        fits = encode(PIL.Image.new("RGB", (4000, 4000)), "PNG")
        await into_slot(path.media, await ready(path.media, fits))
        assert path.metrics.value("saccade_decodes_total") == 1


LARGE: dict[str, dict[str, object]] = {
    "JPEG RGB": {"quality": 60, "progressive": True, "subsampling": 0},
    "JPEG CMYK": {"quality": 60, "progressive": True, "subsampling": 0},
    "PNG RGBA": {"compress_level": 1},
    "GIF L": {},
    "BMP RGB": {},
    "TIFF RGB": {"compression": "tiff_lzw"},
    "WEBP RGBA": {"lossless": True, "quality": 0, "method": 0},
    "AVIF RGBA": {"speed": 10, "quality": 30},
    "HEIF RGBA": {"quality": 60, "chroma": 444, "enc_params": {"preset": "ultrafast"}},
}


@pytest.mark.slow
async def test_large_pictures_are_decoded_in_the_memory_they_are_priced_at(
    media_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's address space is limited to that price, so one that takes more fails."""
    monkeypatch.setattr("saccade.media.workers.pool.SLACK_BYTES", 16 << 20)
    image = PIL.Image.fromarray(photo(2700, 3600))
    async with media_path() as path:
        for kind, saved in LARGE.items():
            format, mode = kind.split()
            data = encode(image.convert(mode), format, **saved)
            await into_slot(path.media, await ready(path.media, data))
        assert path.metrics.value("saccade_decodes_total") == len(LARGE)


async def test_a_header_is_read_once_for_the_same_bytes(media_path: MakePath) -> None:
    async with media_path() as path:
        data = encode(noise(50, 50))
        await path.media.open_all([source(data)] * 20, "")
        await path.media.open(source(data, budget=Budget(max_pixels=64 * 64)), "")
        assert path.metrics.value("saccade_headers_read_total") == 1
        for _ in range(2):  # nobody believes what another's reader has said
            await path.media.open(source(data), "salt")
        assert path.metrics.value("saccade_headers_read_total") == 2


@pytest.mark.parametrize("orient", ["landscape", "portrait"])
async def test_transparent_pictures_are_white_below_whatever_way_they_come(
    media_path: MakePath, orient: str
) -> None:
    size = (96, 64) if orient == "landscape" else (64, 96)
    image = PIL.Image.new("RGBA", size)
    image.paste((0, 0, 0, 255), (16, 16, 48, 48))
    async with media_path() as path:
        slots = []
        for place, thing in enumerate((image, encode(image), encode(image, "WEBP"))):
            picture = await path.media.open(source_from_object(thing, "part"), "")
            path.media.hold_image(picture)
            slots.append(await into_slot(path.media, picture, place << 20))
        first, *others = (path.arena.view(slot) for slot in slots)
        assert (first[0, 0].tolist(), first[32, 32].tolist()) == ([255] * 3, [0] * 3)
        for other in others[:1]:
            np.testing.assert_array_equal(first, other)
