"""Every kind of media answers one protocol: metadata and units without a pixel, then pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from saccade.media.kind import MediaKind
from saccade.media.opened import EncodedBytes, Kind, OpenedImage
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import ImageSource, SentFile, Source, VideoSource
from saccade.media.sources.source_reader import Reads
from saccade_bench.fixtures.pdf import Sheet, pdf
from tests.media.conftest import MakePath, Path
from tests.media.pictures import encode, noise, photo

FRAMES = tuple(encode(noise(64, 64, seed)) for seed in range(4))
SOURCES: dict[Kind, Source | SentFile] = {
    "still": ImageSource(encode(photo(100, 120)), "here"),
    "video": VideoSource(FRAMES, "here"),
    "document": SentFile(pdf([Sheet(["one"]), Sheet(["two"])]), "here"),
}
IMAGES: dict[Kind, int] = {"still": 1, "video": 2, "document": 2}


async def shown(path: Path, source: Source | SentFile, reads: Reads) -> list[OpenedImage]:
    """The images of a source, by its kind alone; pages of documents are opened as sources."""
    kind: MediaKind[Any, Any, Any] = path.media.kinds[source.kind]
    kind.check(source)
    kind.begin_reads(source, reads)
    units = await kind.units(source, await kind.metadata(source, reads), reads)
    if not isinstance(units, tuple):
        return list(units.images)
    pages = [ImageSource(page.image, "here") for page in units]
    return [image for page in pages for image in await shown(path, page, reads)]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_a_kind_names_images_without_a_pixel_and_says_how_each_is_made(
    media_path: MakePath, source: Source | SentFile
) -> None:
    async with media_path() as path:
        reads = Reads(path.media.reader, "", Requester())
        images = await shown(path, source, reads)
        assert path.metrics.value("saccade_images_decoded_total") == 0
        assert [image.kind for image in images] == [source.kind] * IMAGES[source.kind]
        assert len({image.image.key for image in images}) == len(images)
        again = await shown(path, source, Reads(path.media.reader, "", Requester()))
        assert [image.image for image in again] == [image.image for image in images]
        for image in images:
            jobs = await path.media.kinds[image.kind].pixels(image)
            assert jobs is not None
            assert [job.digest for job in jobs] == [frame.encoded.digest for frame in image.frames]
            assert all(job.data for job in jobs)


@pytest.mark.parametrize("kind", SOURCES)
async def test_an_image_without_its_bytes_has_no_pixels_unless_a_page_can_be_drawn(
    media_path: MakePath, kind: Kind
) -> None:
    async with media_path() as path:
        reads = Reads(path.media.reader, "", Requester())
        image = (await shown(path, SOURCES[kind], reads))[0]
        frames = [
            replace(each, encoded=EncodedBytes(b"", each.encoded.digest, each.encoded.page))
            for each in image.frames
        ]
        bare = replace(image, frames=tuple(frames))
        jobs = await path.media.kinds[kind].pixels(bare)
        if kind == "document":
            assert jobs is not None and [job.data for job in jobs] == [image.data]
        else:
            assert jobs is None
