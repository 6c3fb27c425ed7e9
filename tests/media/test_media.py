"""The path of a picture: opened without decoding, decoded once, handed over by key; its bytes kept
while a request needs them.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path as FilePath

import numpy as np
import PIL.Image
import pytest

from saccade.core.errors import ImageError, InvalidRequest, TooLarge
from saccade.media.content import Budget
from saccade.media.media import ImageSource, Media, Picture, source_from_object
from saccade.media.pool import DecodePool
from tests.media.conftest import MakePath
from tests.media.pictures import decoded, encode, noise, photo, resized


def source(
    data: bytes, param: str = "messages[0].content[0]", budget: Budget | None = None
) -> ImageSource:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return ImageSource(url, param, budget or Budget())


async def ready(media: Media, data: bytes, salt: str = "") -> Picture:
    picture = await media.open(source(data), salt)
    media.hold(picture)
    return picture


def test_a_picture_travels_from_url_to_pixels(media_path: MakePath) -> None:
    async def scenario() -> None:
        data = encode(photo(200, 300), "JPEG")
        async with media_path() as path:
            picture = await ready(path.media, data)
            assert (picture.size, picture.image.grid, picture.image.num_tokens) == (
                (192, 288),
                (1, 12, 18),
                54,
            )
            slot = await path.media.pixels(picture.image.key)
            np.testing.assert_array_equal(path.arena.view(slot), resized(decoded(data), (192, 288)))
            assert path.metrics.value("saccade_images_received_total") == 1
            assert path.metrics.value("saccade_images_decoded_total") == 1
            assert path.metrics.value("saccade_image_bytes_shipped_total") == 192 * 288 * 3
            assert path.metrics.value("saccade_arena_bytes_in_use") == 192 * 288 * 3
            path.media.free(slot)
            path.media.release(picture)
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0

    asyncio.run(scenario())


def test_opening_decodes_nothing(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            await path.media.open_all(
                [source(encode(noise(50, 50, seed))) for seed in range(5)], ""
            )
            assert path.metrics.value("saccade_images_decoded_total") == 0
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0

    asyncio.run(scenario())


def test_a_picture_is_decoded_once_whoever_asks(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            data = encode(noise(100, 100))
            pictures = [await ready(path.media, data) for _ in range(16)]
            for picture in pictures:
                path.media.decode_ahead(picture)
            key = pictures[0].image.key
            slots = await asyncio.gather(*(path.media.pixels(key) for _ in range(3)))
            assert len(set(slots)) == 1
            assert path.metrics.value("saccade_images_decoded_total") == 1
            for slot in slots:
                path.media.free(slot)
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0

    asyncio.run(scenario())


def test_tenants_and_settings_share_nothing(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            data = encode(noise(300, 300))
            opened = [
                await path.media.open(source(data), "one"),
                await path.media.open(source(data), "other"),
                await path.media.open(source(data, budget=Budget(max_pixels=64 * 64)), "one"),
            ]
            for picture in opened:
                path.media.hold(picture)
            slots = [await path.media.pixels(picture.image.key) for picture in opened]
            assert len({slot.offset for slot in slots}) == 3
            assert path.metrics.value("saccade_images_decoded_total") == 3

    asyncio.run(scenario())


def test_the_others_still_get_it_when_the_first_asker_leaves(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            picture = await ready(path.media, encode(noise(100, 100)))
            first = asyncio.create_task(path.media.pixels(picture.image.key))
            second = asyncio.create_task(path.media.pixels(picture.image.key))
            await asyncio.sleep(0)
            first.cancel()
            slot = await second
            assert path.metrics.value("saccade_images_decoded_total") == 1
            path.media.free(slot)
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0, (
                "the one who left holds nothing"
            )

    asyncio.run(scenario())


def test_a_decode_nobody_needs_any_more_is_not_begun(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            picture = await ready(path.media, encode(noise(100, 100)))
            path.media.decode_ahead(picture)
            await asyncio.sleep(0)
            assert (
                path.metrics.value("saccade_arena_bytes_in_use")
                == picture.size[0] * picture.size[1] * 3
            )
            path.media.release(picture)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0
            other = await ready(path.media, encode(noise(100, 100, seed=1)))
            await path.media.pixels(other.image.key)
            assert path.metrics.value("saccade_images_decoded_total") == 1
            with pytest.raises(ImageError, match="has ended"):
                await path.media.pixels(picture.image.key)

    asyncio.run(scenario())


def test_a_confirmed_picture_is_not_decoded_ahead_but_on_demand(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            confirmed, new = (
                await ready(path.media, encode(noise(64, 64))),
                await ready(path.media, encode(noise(64, 64, seed=1))),
            )
            path.media.confirm([confirmed.image.key])
            path.media.decode_ahead(confirmed)
            path.media.decode_ahead(new)
            path.media.free(await path.media.pixels(new.image.key))
            assert path.metrics.value("saccade_images_decoded_total") == 1
            path.media.free(await path.media.pixels(confirmed.image.key))
            assert path.metrics.value("saccade_images_decoded_total") == 2

    asyncio.run(scenario())


def test_pixels_still_in_the_arena_are_not_decoded_again(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            picture = await ready(path.media, encode(noise(64, 64)))
            for _ in range(3):
                path.media.free(await path.media.pixels(picture.image.key))
            assert path.metrics.value("saccade_images_decoded_total") == 1
            assert path.metrics.value("saccade_image_hits_total", level="pixels") == 2

    asyncio.run(scenario())


def test_a_failure_is_told_and_not_remembered(media_path: MakePath) -> None:
    async def scenario() -> None:
        async with media_path() as path:
            data = encode(noise(200, 200), "JPEG")
            picture = await ready(path.media, data[: len(data) // 2])
            for _ in range(2):
                with pytest.raises(ImageError, match=r"cannot be decoded: .*truncated"):
                    await path.media.pixels(picture.image.key)
            assert path.metrics.value("saccade_arena_bytes_in_use") == 0
            assert path.metrics.value("saccade_decode_worker_restarts_total") == 0
            await path.media.pixels((await ready(path.media, data)).image.key)

    asyncio.run(scenario())


def test_all_who_wait_hear_of_one_failure_and_who_asks_later_starts_anew(
    media_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes = []
    decode = DecodePool.decode
    monkeypatch.setattr(
        DecodePool,
        "decode",
        lambda self, job, offset: (decodes.append(job), decode(self, job, offset))[1],
    )

    async def scenario() -> None:
        async with media_path() as path:
            picture = await ready(path.media, encode(noise(200, 200), "JPEG")[:3000])
            path.media.decode_ahead(picture)
            for expected in (1, 2):
                waiting = [path.media.pixels(picture.image.key) for _ in range(5)]
                errors = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(
                    isinstance(error, ImageError) and "is truncated" in error.message
                    for error in errors
                )
                assert len(decodes) == expected

    asyncio.run(scenario())


def test_errors_name_the_part_of_the_request(media_path: MakePath) -> None:
    async def scenario() -> None:
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
                InvalidRequest, match=r"10000 pictures; the limit is 9000.*--max-images-per-request"
            ):
                await path.media.open_all([good] * 10_000, "")
            with pytest.raises(ImageError, match=r"320 x 320 px.*--arena-mb"):
                await path.media.open(source(encode(PIL.Image.new("L", (320, 320)))), "")
            with pytest.raises(TooLarge, match="--max-image-bytes") as large:
                await path.media.open(source(encode(noise(100, 100))), "")
            assert (large.value.status, large.value.param) == (413, "messages[0].content[0]")

    asyncio.run(scenario())


def test_objects_behind_the_front_become_pictures(media_path: MakePath, tmp_path: FilePath) -> None:
    async def scenario() -> None:
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
                picture = await path.media.open(
                    source_from_object(thing, "messages[0].content[0]"), ""
                )
                path.media.hold(picture)
                keys.append(picture.image.key)
                np.testing.assert_array_equal(
                    path.arena.view(await path.media.pixels(keys[-1])), pixels
                )
            assert keys[0] == keys[1]
            assert keys[2] == keys[3]
        for thing in (3, tmp_path / "b.png"):
            with pytest.raises(ImageError, match=r"must be bytes|cannot be read"):
                source_from_object(thing, "messages[0].content[0]")

    asyncio.run(scenario())
