"""Regions of held images: each equals the crop that a client would make, bit for bit, and costs no
upload, and no decode where pixels are held.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import pathlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from blake3 import blake3

from saccade.core.errors import ImageError
from saccade.core.plan import PixelSlot
from saccade.media.content import Budget
from saccade.media.opened import OpenedImage
from saccade.media.sent_files import SentFiles
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import (
    Address,
    Digest,
    FileId,
    ImageRegion,
    ImageSource,
    RegionSource,
    SentFile,
)
from saccade.plugins.files.uploads import uploads_of
from tests.helpers.images import data_url
from tests.media.conftest import MakePath, Path
from tests.media.pictures import encode, noise, photo

AT = "messages[0].content[0]"
DECODES = "saccade_decodes_total"
Box = tuple[int, int, int, int]


def region(url: Address, box: Box, budget: Budget | None = None) -> RegionSource:
    return RegionSource(url, AT, budget or Budget(), region=ImageRegion(*box, f"{AT}.region"))


def inline(data: bytes) -> str:
    return data_url(data)


def upright(data: bytes) -> PIL.Image.Image:
    return PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data)))


def cropped(data: bytes, box: Box) -> bytes:
    """The crop as a client would make it."""
    file = io.BytesIO()
    image = upright(data)
    mode = "RGBA" if image.mode in ("P", "PA", "LA") else image.mode
    image.convert(mode).crop(box).save(file, "TIFF" if mode == "CMYK" else "PNG")
    return file.getvalue()


async def pixels(path: Path, source: ImageSource) -> tuple[OpenedImage, bytes]:
    """An image, and what the tower would see of it."""
    opened = await path.media.open(source, "")
    path.media.hold_image(opened)
    slot = PixelSlot(0, *opened.image.canvas)
    await path.media.decode(opened.image.key, slot)
    path.media.release_image(opened)
    return opened, path.arena.view(slot).tobytes()


async def test_a_region_equals_the_crop_of_a_client(media_path: MakePath) -> None:
    data, box = encode(photo(300, 400)), (31, 7, 233, 190)
    async with media_path() as path:
        region_seen, region_pixels = await pixels(path, region(data, box))
        crop_seen, crop_pixels = await pixels(path, ImageSource(cropped(data, box), AT))
        assert region_pixels == crop_pixels
        assert region_seen.image.num_tokens == crop_seen.image.num_tokens
        assert region_seen.image.grid == crop_seen.image.grid
        assert region_seen.image.key != crop_seen.image.key


def picture(kind: str) -> bytes:
    """A picture in a format and mode whose pixels are easily got wrong."""
    image = PIL.Image.fromarray(photo(120, 170))
    file = io.BytesIO()
    exif = PIL.Image.Exif()
    match kind:
        case "alpha":
            image.putalpha(PIL.Image.fromarray(noise(120, 170)[..., 0]))
            image.save(file, "PNG")
        case "palette":
            image.quantize(16).save(file, "PNG", transparency=3)
        case "16 bit":
            deep = np.asarray(image.convert("L")).astype(np.uint16) * 3
            PIL.Image.fromarray(deep).save(file, "PNG")
        case "CMYK":
            image.convert("CMYK").save(file, "JPEG", quality=90)
        case "grey":
            image.convert("L").save(file, "JPEG")
        case "animated":
            others = [PIL.Image.new("RGB", image.size, colour) for colour in ("red", "blue")]
            image.save(file, "GIF", save_all=True, append_images=others)
        case _:
            exif[0x0112] = int(kind)
            image.save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    "kind", ["alpha", "palette", "16 bit", "CMYK", "grey", "animated", "3", "6", "8"]
)
async def test_in_every_mode(media_path: MakePath, kind: str) -> None:
    """Of an upright image, and of an animation's first frame, as the model sees them."""
    data, box = picture(kind), (5, 11, 97, 88)
    async with media_path() as path:
        _, mine = await pixels(path, region(data, box))
        _, theirs = await pixels(path, ImageSource(cropped(data, box), AT))
        assert mine == theirs


@pytest.mark.parametrize(
    "box", [(0, 0, 1, 1), (399, 299, 400, 300), (0, 0, 400, 1), (0, 299, 3, 300), (1, 0, 400, 300)]
)
async def test_at_the_limits(media_path: MakePath, box: Box) -> None:
    data = encode(photo(300, 400))
    async with media_path() as path:
        try:
            _, theirs = await pixels(path, ImageSource(cropped(data, box), AT))
        except ImageError as error:  # a shape that no model takes, whoever made it
            with pytest.raises(ImageError) as refused:
                await path.media.open(region(data, box), "")
            assert refused.value.message == error.message
        else:
            assert (await pixels(path, region(data, box)))[1] == theirs


async def test_all_of_an_image_is_the_image(media_path: MakePath) -> None:
    data = encode(photo(30, 40))
    async with media_path() as path:
        whole = await path.media.open(ImageSource(data, AT), "")
        same = await path.media.open(region(data, (0, 0, 40, 30)), "")
        assert same.image == whole.image and same.kind == "still"


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 401, 300),
        (0, 0, 400, 301),
        (-1, 0, 4, 4),
        (0, -1, 4, 4),
        (5, 5, 5, 9),
        (5, 5, 9, 5),
        (9, 9, 5, 5),
        (400, 300, 400, 300),
        (0, 0, 2**63 - 1, 2**63 - 1),
        (-(2**63), 0, 1, 1),
    ],
)
async def test_a_region_beside_the_image_is_refused_with_its_size(
    media_path: MakePath, box: Box
) -> None:
    async with media_path() as path:
        with pytest.raises(ImageError) as refused:
            await path.media.open(region(encode(photo(300, 400)), box), "")
        assert refused.value.param == f"{AT}.region"
        assert refused.value.code == "invalid_region"
        assert "400 x 300 px" in refused.value.message
        assert path.metrics.value(DECODES) == 0


async def test_the_bounds_are_those_of_the_upright_image(media_path: MakePath) -> None:
    async with media_path() as path:
        turned = picture("6")  # 120 wide and 170 high, once upright
        assert (await path.media.open(region(turned, (0, 0, 120, 9)), "")).image.num_tokens
        with pytest.raises(ImageError, match="120 x 170 px"):
            await path.media.open(region(turned, (0, 0, 121, 9)), "")


async def test_regions_have_names_of_their_own(media_path: MakePath) -> None:
    """By image, corners, bounds and salt."""
    data = encode(photo(300, 400))
    async with media_path() as path:

        async def key(source: ImageSource, salt: str = "") -> object:
            return (await path.media.open(source, salt)).image.key

        first = region(data, (0, 0, 200, 200))
        assert await key(first) == await key(region(inline(data), (0, 0, 200, 200)))
        others = [
            await key(ImageSource(data, AT)),
            await key(region(data, (0, 0, 200, 199))),
            await key(region(data, (0, 1, 200, 201))),
            await key(region(data, (0, 0, 200, 200), Budget(max_pixels=128 * 128))),
            await key(region(encode(noise(300, 400)), (0, 0, 200, 200))),
            await key(first, "salt"),
        ]
        assert len({await key(first), *others}) == 1 + len(others)


def named(data: bytes) -> list[Digest]:
    return [
        Digest(f"blake3-{blake3(data).hexdigest()}"),
        Digest(f"sha256-{hashlib.sha256(data).hexdigest()}"),
    ]


async def test_a_digest_names_an_image_of_the_same_request(media_path: MakePath) -> None:
    data = encode(photo(30, 40))
    async with media_path() as path:
        for name in named(data):
            sources = (region(name, (1, 2, 30, 28)), ImageSource(inline(data), AT))
            opened = await path.media.open_all(sources, "")
            (shown,) = opened[0].images
            alone = await path.media.open(region(data, (1, 2, 30, 28)), "")
            assert shown.image == alone.image


async def test_an_unknown_digest_is_refused(media_path: MakePath) -> None:
    """Alike for one that never was, and for an image of another request."""
    data = encode(photo(30, 40))
    async with media_path() as path:
        await pixels(path, ImageSource(data, AT))
        for name in (*named(data), Digest("blake3-" + 64 * "0")):
            for source in (ImageSource(name, AT), region(name, (0, 0, 9, 9))):
                with pytest.raises(ImageError, match="send its bytes") as refused:
                    await path.media.open(source, "")
                assert refused.value.code == "unknown_digest"
                assert refused.value.param == AT


async def test_an_uploaded_image_is_known_by_its_digest_to_its_owner_alone(
    media_path: MakePath, tmp_path: pathlib.Path
) -> None:
    data = encode(photo(30, 40))
    async with media_path(files_dir=str(tmp_path / "files")) as path:
        stored = await uploads_of(path.media).save(data, "a.png", "vision", None, "ann")
        (name, _) = named(data)
        ann, bob = (Requester(owner=owner, tenant=owner) for owner in ("ann", "bob"))
        opened = await path.media.open(region(name, (0, 0, 9, 9)), "", ann)
        same = region(FileId(stored.id), (0, 0, 9, 9))
        assert opened.image == (await path.media.open(same, "", ann)).image
        messages = []
        for digest in (name, Digest("blake3-" + 64 * "0")):
            with pytest.raises(ImageError) as refused:
                await path.media.open(region(digest, (0, 0, 9, 9)), "", bob)
            messages.append(refused.value.message.replace(digest.name, ""))
        assert messages[0] == messages[1]
        await uploads_of(path.media).delete(stored.id, "ann")
        with pytest.raises(ImageError, match="send its bytes"):
            await path.media.open(region(name, (0, 0, 9, 9)), "", ann)


async def test_an_image_and_its_regions_are_one_decode(media_path: MakePath) -> None:
    """In one request: each is resized from the same decoded pixels."""
    data = encode(photo(300, 400))
    boxes = [(0, 0, 100, 100), (100, 100, 400, 300)]
    async with media_path() as path:
        sources = [ImageSource(data, AT), *(region(data, box) for box in boxes)]
        found = [image for each in await path.media.open_all(sources, "") for image in each.images]
        slots, offset = [], 0
        for each in found:
            path.media.hold_image(each)
            slots.append(PixelSlot(offset, *each.image.canvas))
            offset += slots[-1].nbytes
        keys = [each.image.key for each in found]
        await asyncio.gather(*map(path.media.decode, keys, slots))
        seen = [path.arena.view(slot).tobytes() for slot in slots]
        assert path.metrics.value(DECODES) == 1
        crops = [ImageSource(data, AT), *(ImageSource(cropped(data, box), AT) for box in boxes)]
        assert seen == [(await pixels(path, each))[1] for each in crops]


# ---- what is held


async def test_further_regions_decode_nothing(media_path: MakePath) -> None:
    data = encode(photo(300, 400))
    async with media_path() as path:
        for box in ((0, 0, 100, 100), (0, 0, 100, 100), (50, 60, 399, 300)):
            _, mine = await pixels(path, region(data, box))
            assert path.metrics.value(DECODES) == 1
            async with media_path() as another:
                assert (await pixels(another, ImageSource(cropped(data, box), AT)))[1] == mine


async def test_regions_asked_for_together_are_one_decode(media_path: MakePath) -> None:
    data = encode(photo(300, 400))
    async with media_path() as path:
        boxes = [(0, top, 100, top + 100) for top in range(0, 200, 40)]
        slots = []
        for number, box in enumerate(boxes):
            opened = await path.media.open(region(data, box), "")
            path.media.hold_image(opened)
            slot = PixelSlot(number << 20, *opened.image.canvas)
            slots.append(path.media.decode(opened.image.key, slot))
        await asyncio.gather(*slots)
        assert path.metrics.value(DECODES) == 1


async def test_what_is_held_is_its_tenants(media_path: MakePath) -> None:
    data, decodes = encode(photo(300, 400)), []
    async with media_path() as path:
        for tenant in ("a", "b", "a", "b"):
            requester = Requester(tenant=tenant)
            opened = await path.media.open(region(data, (0, 0, 90, 90)), tenant, requester)
            path.media.hold_image(opened)
            await path.media.decode(opened.image.key, PixelSlot(0, *opened.image.canvas))
            decodes.append(path.metrics.value(DECODES))
    assert decodes == [1, 2, 2, 2]


@pytest.mark.more
async def test_pixels_that_are_too_many_are_not_held(media_path: MakePath) -> None:
    """7 MiB are, of these 112."""
    data, box = encode(photo(1600, 1550)), (10, 20, 1000, 1100)
    async with media_path(decode_memory_mb=112) as path:
        for count in (1, 2):
            _, mine = await pixels(path, region(data, box))
            assert path.metrics.value(DECODES) == count
        _, theirs = await pixels(path, ImageSource(cropped(data, box), AT))
        assert mine == theirs


@pytest.mark.more
async def test_pixels_held_for_long_give_way(media_path: MakePath) -> None:
    """Three such images fit into 7 MiB."""
    images, box = [encode(photo(900, 900, seed)) for seed in range(4)], (10, 20, 500, 600)
    async with media_path(decode_memory_mb=112) as path:
        for data in (*images, images[0], images[0]):
            await pixels(path, region(data, box))
        assert path.metrics.value(DECODES) == 5


@pytest.mark.more
async def test_parts_beyond_the_room_for_them_are_decoded(media_path: MakePath) -> None:
    """7 MiB hold one of these parts at a time. Once it is resized, they hold the next."""
    data = encode(photo(1500, 1500))
    boxes = [(0, 0, 1500, 1499), (0, 1, 1500, 1500), (1, 1, 1500, 1500)]
    async with media_path(decode_memory_mb=112) as path:
        decodes, slots = [], []
        for number, box in enumerate(boxes):
            opened = await path.media.open(region(data, box), "")
            path.media.hold_image(opened)
            slots.append(PixelSlot(number * (5 << 20), *opened.image.canvas))
            decodes.append(path.media.decode(opened.image.key, slots[-1]))
        await asyncio.gather(*decodes[:2])
        assert path.metrics.value(DECODES) == 2
        await decodes[2]
        assert path.metrics.value(DECODES) == 2
        seen = [path.arena.view(slot).tobytes() for slot in slots]
        for box, mine in zip(boxes, seen, strict=True):
            assert (await pixels(path, ImageSource(cropped(data, box), AT)))[1] == mine


async def test_a_damaged_image_has_no_regions(media_path: MakePath) -> None:
    data = encode(noise(300, 400))
    async with media_path() as path:
        opened = await path.media.open(region(data[: len(data) // 2], (0, 0, 90, 90)), "")
        path.media.hold_image(opened)
        for _ in range(2):
            with pytest.raises(ImageError, match="cannot be decoded"):
                await path.media.decode(opened.image.key, PixelSlot(0, *opened.image.canvas))


async def test_files_have_regions_where_they_are_images(media_path: MakePath) -> None:
    data, box = encode(photo(30, 40)), ImageRegion(0, 0, 9, 9, f"{AT}.region")
    async with media_path() as path:
        sent = [SentFile(data, AT, region=box)]
        (part,) = await SentFiles(path.media).open(sent, "", Requester())
        assert part == RegionSource(data, AT, region=box)
