"""What one client's bytes make of an image worker is no other client's concern: code that stays in
a worker sees no other's bytes, paints over no other's image, and speaks for none.
"""

from __future__ import annotations

import asyncio
import atexit
from functools import cache

import numpy as np
import PIL.Image
import pytest

from saccade.core.client import Client
from saccade.core.config import DocumentView
from saccade.core.errors import ImageError
from saccade.core.family import FamilySpec
from saccade.core.plan import PixelSlot
from saccade.core.recipe import whole
from saccade.core.video import VideoOptions
from saccade.media.content import Budget, Probe
from saccade.media.opened import OpenedImage, OpenedVideo
from saccade.media.reasons import READS_HEIC
from saccade.media.sent_files import OpenedPage, SentFiles
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import ImageSource, SentFile, VideoSource
from saccade.media.workers import fork_server
from saccade.media.workers.decode_queue import Job, JobQueue
from saccade.media.workers.fork_server import ForkServers
from saccade_bench.fixtures.pdf import Sheet, pdf
from tests.media import holed
from tests.media.clips import clip
from tests.media.conftest import MakePath, Path, paths_of
from tests.media.pictures import decoded, encode, noise, photo

RENEWALS = "saccade_image_worker_renewals_total"
RESTARTS, DECODES = "saccade_image_worker_restarts_total", "saccade_decodes_total"
HEADERS = "saccade_headers_read_total"
ANNA, MALLORY = Client("anna", limited=True), Client("mallory", limited=True)


@cache
def holed_fork_servers() -> ForkServers:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "SUPERVISOR", holed.__name__)
        fork_servers = ForkServers()
        fork_servers.start()
    atexit.register(fork_servers.close)
    return fork_servers


@pytest.fixture
def holed_path(spec: FamilySpec) -> MakePath:
    """A media path whose image workers have a hole."""
    return paths_of(spec, holed_fork_servers)


def asks(client: Client, salt: str = "") -> Requester:
    return Requester(client.share(salt), client.name, tenant=client.tenant(salt))


async def opened(path: Path, client: Client, *data: bytes, salt: str = "") -> list[OpenedImage]:
    sources = [ImageSource(each, "here") for each in data]
    found = await path.media.open_all(sources, client.salt(salt), asks(client, salt))
    return [each for each in found if isinstance(each, OpenedImage)]


async def pixels_of(path: Path, image: OpenedImage, offset: int = 0) -> np.ndarray:
    path.media.hold_image(image)
    slot = PixelSlot(offset, *image.image.canvas)
    try:
        await path.media.decode(image.image.key, slot)
        return path.arena.view(slot).copy()
    finally:
        path.media.release_image(image)


async def show(
    path: Path, client: Client, data: bytes, salt: str = "", offset: int = 0
) -> np.ndarray:
    """An image as its client gets it."""
    (image,) = await opened(path, client, data, salt=salt)
    return await pixels_of(path, image, offset)


SECRET = encode(noise(256, 256, seed=5))
LARGE = encode(noise(512, 512, seed=6))


def tells(dump: np.ndarray) -> bool:
    """True if there is some of the secret image in what a worker says."""
    said, drawn = dump.tobytes(), decoded(SECRET).tobytes()
    return any(part in said for part in (SECRET[500:564], SECRET[-200:-136], drawn[:64]))


TWO = {
    "two keys": (MALLORY, "", ANNA, ""),
    "two salts of a key": (MALLORY, "one", MALLORY, "two"),
    "two salts without a key": (Client(), "one", Client(), "two"),
    "a salt and none": (Client(), "one", Client(), ""),
    "two keys that share a cache": (
        *(Client("mallory", "", True, True), "", Client("anna", "", True, True), ""),
    ),
}


@pytest.mark.first
@pytest.mark.parametrize("two", TWO)
async def test_code_that_stays_reads_nothing_of_another_clients(
    holed_path: MakePath, two: str
) -> None:
    mallory, salt, anna, other = TWO[two]
    async with holed_path() as path:
        told = []
        for client, of in ((anna, other), (mallory, salt)):
            evil = holed.with_code(encode(noise(64, 64)), holed.SPY)
            await show(path, mallory, evil, salt)
            await show(path, client, SECRET, of)
            dump = holed.with_code(LARGE, holed.TELL)
            told.append(tells(await show(path, mallory, dump, salt)))
        of_others, of_its_own = told
    assert of_its_own, "the attack works"
    assert not of_others


ATTACKS = {
    "paints over later images": holed.BLACKEN,
    "goes on after its answer": holed.STAY,
    "leaves a thread behind": holed.THREAD,
    "lies about later images": holed.LIE,
}


def evil_of(code: str) -> bytes:
    """A HEIC where code wants a thread: to no other is one granted."""
    kind = "HEIF" if code == holed.THREAD and READS_HEIC else "PNG"
    return holed.with_code(encode(PIL.Image.fromarray(photo(64, 64)), kind), code)


@pytest.mark.first
@pytest.mark.parametrize("name", ATTACKS)
async def test_code_that_stays_changes_nothing_of_another_clients(
    holed_path: MakePath, name: str
) -> None:
    """Nor where both send the same bytes, at once or one after the other."""
    if name == "leaves a thread behind" and not READS_HEIC:
        pytest.skip("no image has a thread")
    # What goes on after its answer takes no order of its own client, until that time is up.
    async with holed_path(decode_timeout=6.0) as path:
        (evil,) = await opened(path, MALLORY, evil_of(ATTACKS[name]))
        await pixels_of(path, evil)
        shared = encode(noise(128, 96, seed=9))
        (hers, *_), (his, *_) = await asyncio.gather(
            opened(path, ANNA, shared), opened(path, MALLORY, shared)
        )
        assert hers.probe == Probe("PNG", 128, 96, "RGB", 1, 1)
        if his.probe == hers.probe:
            both = (pixels_of(path, each, at << 20) for at, each in enumerate((his, hers)))
            found = (await asyncio.gather(*both, return_exceptions=True))[1]
            assert isinstance(found, np.ndarray), "his own may be lost"
        else:
            found = await pixels_of(path, hers)
        np.testing.assert_array_equal(found, decoded(shared))
        np.testing.assert_array_equal(await show(path, ANNA, SECRET), decoded(SECRET))


async def test_what_a_worker_says_of_a_header_is_believed_by_its_own_client_alone(
    holed_path: MakePath,
) -> None:
    """Images of one request, and a file that was uploaded."""
    async with holed_path() as path:
        evil = holed.with_code(encode(noise(64, 64)), holed.LIE)
        await SentFiles(path.media).check(evil, "file", MALLORY)  # first, whichever is hashed first
        await SentFiles(path.media).check(SECRET, "file", MALLORY)
        (lied,) = await opened(path, MALLORY, SECRET)
        assert lied.probe.height == 33, "the attack works"
        await SentFiles(path.media).check(SECRET, "file", ANNA)
        (hers,) = await opened(path, ANNA, SECRET)
        assert hers.probe == Probe("PNG", 256, 256, "RGB", 1, 1)


async def film(path: Path, client: Client, data: bytes) -> OpenedVideo:
    source = VideoSource(data, "here", VideoOptions(fps=2))
    (found,) = await path.media.open_all([source], client.salt(""), asks(client))
    assert isinstance(found, OpenedVideo)
    return found


@pytest.mark.more
async def test_a_videos_metadata_is_its_own_clients(holed_path: MakePath) -> None:
    async with holed_path() as path:
        await film(path, MALLORY, holed.with_code(clip(), holed.LIE))
        lied, hers = await film(path, MALLORY, clip()), await film(path, ANNA, clip())
        assert len(lied.images) != len(hers.images), "the attack works"
        assert len(hers.images) == 6
        found = [await pixels_of(path, image) for image in hers.images]
        await film(path, MALLORY, holed.with_code(clip(), holed.BLACKEN))
        again = [await pixels_of(path, image) for image in hers.images]
        np.testing.assert_array_equal(found, again)


@pytest.mark.more
async def test_no_images_header_waits_for_a_videos_metadata(holed_path: MakePath) -> None:
    async with holed_path() as path:
        held = asyncio.create_task(film(path, ANNA, holed.with_code(clip(), holed.SLEEP)))
        slot, _ = path.media.decoders.pool.video_headers.slots._slots
        while not slot.busy:
            await asyncio.sleep(0.01)
        assert await show(path, ANNA, SECRET) is not None
        assert not held.done()
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.more
async def test_a_reader_that_stops_its_own_clock_is_ended_by_the_nurserys(
    holed_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is refused from then on, to its own client."""
    monkeypatch.setattr("saccade.media.workers.header_pool.HEADER_SECONDS", 120.0)
    async with holed_path() as path:
        evil = holed.with_code(encode(noise(64, 64)), holed.SPIN)
        for _ in range(2):
            with pytest.raises(ImageError, match="takes too long"):
                await opened(path, MALLORY, evil)
        assert path.metrics.value(RESTARTS) == 1
        await opened(path, ANNA, SECRET)


TELL_PAGE = """
import os
import msgspec
from saccade.media.workers.orders import (DocumentPiece)

def told(order, place, resources):
    found = b"".join(globals().get("kept", ())) + os.pread(resources.inbox, 1 << 22, 0)
    found += bytes(resources.outbox[:1 << 16])
    said = msgspec.msgpack.encode((found.decode("latin-1")[:200_000], b""))
    resources.outbox[:len(said)] = np.frombuffer(said, np.uint8)
    return DocumentPiece(order.worker, order.serial, place, len(said))

if getattr(order, "pages", None):
    once = told
"""


async def read(path: Path, client: Client, data: bytes) -> list[OpenedPage]:
    source = SentFile(data, "file", Budget(max_pixels=64 * 64), view=DocumentView("text"))
    (found,) = await SentFiles(path.media).open([source], client.salt(""), asks(client))
    assert isinstance(found, tuple)
    return [*found]


@pytest.mark.more
async def test_code_of_a_document_reads_and_changes_no_other(holed_path: MakePath) -> None:
    words = "the secret of anna is nineteen"
    hers = pdf([Sheet([words]), Sheet(["two"])])
    mine = pdf([Sheet(["nothing"])])
    async with holed_path() as path:
        await read(path, MALLORY, holed.with_code(mine, holed.SPY, holed.BLACKEN))
        assert [page.text for page in await read(path, ANNA, hers)] == [words, "two"]
        # Each new client takes the worker that was used least recently, so one of them has hers.
        for name in ("eve", "oscar"):
            spy = Client(name, limited=True)
            (page,) = await read(path, spy, holed.with_code(mine, TELL_PAGE))
            assert "nothing" in page.text, "the attack works"
            assert words not in page.text
            (again,) = await read(path, spy, holed.with_code(mine, "kept = [b'x']", TELL_PAGE))
            assert words not in again.text


async def test_one_client_costs_no_worker_and_two_in_turn_one_each(holed_path: MakePath) -> None:
    """A new image has one order for its header and one for its pixels, a seen one has none."""
    async with holed_path() as path:
        images = [encode(noise(64, 64, seed)) for seed in range(4)]
        for _ in range(3):
            for data in images:
                await opened(path, Client(address="127.0.0.1"), data)
        assert path.metrics.value(HEADERS) == len(images)
        for data in images:
            await show(path, Client(address="127.0.0.2"), data)
        counts = [path.metrics.value(name) for name in (HEADERS, DECODES, RENEWALS, RESTARTS)]
        assert counts == [len(images), len(images), 0, 0]
        for data in images:
            await show(path, ANNA, data)
        assert path.metrics.value(RENEWALS) == 2, "one that reads headers, one that decodes"
        await asyncio.gather(*(opened(path, ANNA, encode(noise(9, 9, n))) for n in range(9)))
        assert path.metrics.value(RENEWALS) == 2
        await show(path, MALLORY, images[0])
        assert (path.metrics.value(RENEWALS), path.metrics.value(RESTARTS)) == (4, 0)


async def test_headers_of_two_clients_are_two_orders_and_take_turns(
    holed_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests one of them has: hers come first or second."""
    async with holed_path() as path:
        await opened(path, MALLORY, encode(noise(8, 8)))
        pool = path.media.decoders.pool.headers
        sizes: list[int] = []
        run = pool._run

        async def counted(slot: object, readings: list[object]) -> None:
            sizes.append(len(readings))
            await run(slot, readings)  # type: ignore[arg-type]

        monkeypatch.setattr(pool, "_run", counted)
        his = [encode(noise(8, 9 + n)) for n in range(40)]
        hers = [encode(noise(9, 9 + n)) for n in range(3)]
        await asyncio.gather(
            *(opened(path, MALLORY, data) for data in his), opened(path, ANNA, *hers)
        )
    assert sorted(sizes) == [3, 8, 16, 16]
    assert sizes.index(3) <= 1


def test_one_decode_serves_one_clients_jobs() -> None:
    turns, tiny = JobQueue(1 << 40), Probe("PNG", 10, 10, "RGB", 1, 1)
    jobs = [Job(b"same", b"", tiny, whole((32, 32)), tenant=name) for name in "abab"]
    for job in jobs:
        turns.add(job)
    first = turns.take_jobs(())
    assert first is not None and first.jobs == [jobs[0], jobs[2]]
    second = turns.take_jobs([first])
    assert second is not None and second.jobs == [jobs[1], jobs[3]]
