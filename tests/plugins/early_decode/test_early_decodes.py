"""What is started while a body arrives: which image first, whose it is, and what is left of it when
the body is another's, is cut off, or was sent to waste time.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from saccade.core.client import Client, Permits
from saccade.core.config import MIB
from saccade.core.family import FamilySpec
from saccade.edge.body import Bodies, BufferedBody
from saccade.front.request_manager import RequestManager
from saccade.media.content import Budget, digest
from saccade.media.opened import OpenedImage
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import DEFAULT_BUDGET, ImageSource
from saccade.plugins.early_decode.early_decodes import MAX_UNUSED, ArrivingBody, EarlyDecodes
from tests.helpers.images import data_url, image_part, user
from tests.media import holed
from tests.media.conftest import MakePath, Path, paths_of
from tests.media.pictures import decoded, encode, noise
from tests.media.test_tenants import LARGE, SECRET, holed_fork_servers, pixels_of, show, tells

EARLY, UNUSED = "saccade_early_decodes_total", "saccade_early_decodes_unused_total"
DECODES, RENEWALS = "saccade_decodes_total", "saccade_image_worker_renewals_total"
BUFFERED = "saccade_request_bytes_buffered"
FILES = [encode(noise(192, 192, seed)) for seed in range(4)]


class Arrivals:
    """Bodies that arrive at a media path without a server."""

    def __init__(self, path: Path, max_requests: int = 8) -> None:
        self.path = path
        self.permits = Permits(max_requests, "--max-queued-requests")
        self.bodies = Bodies(64 * MIB, path.metrics)
        front = SimpleNamespace(
            intake=SimpleNamespace(media=path.media), metrics=path.metrics, permits=self.permits
        )
        self.watch = EarlyDecodes(cast(RequestManager, front))

    def start(self, client: Client, *files: bytes) -> tuple[BufferedBody, ArrivingBody | None]:
        """All bytes of a chat but the last, in one chunk."""
        held = BufferedBody(self.bodies, client)
        watcher = held.watcher = self.watch(held)
        body = json.dumps({"messages": [user(*map(image_part, files))]}).encode()
        if watcher is not None:
            watcher.feed(body[:-1])
        return held, watcher

    async def started(self, *watchers: ArrivingBody | None) -> None:
        """Wait until what was started has ended."""
        for watcher in watchers:
            assert watcher is not None
            if watcher._task is not None:
                await watcher._task

    def value(self, name: str) -> float:
        return self.path.metrics.value(name)

    async def show(
        self, held: BufferedBody, data: bytes, salt: str = "", budget: Budget = DEFAULT_BUDGET
    ) -> np.ndarray:
        """An image as the engine gets it, of the request that `held` has the body of."""
        client = held.client
        requester = Requester(client.share(salt), client.name, held, client.tenant(salt))
        source = ImageSource(data_url(data), "here", budget)
        (image,) = await self.path.media.open_all([source], client.salt(salt), requester)
        assert isinstance(image, OpenedImage)
        return await pixels_of(self.path, image)


ANNA, BERT = Client(address="10.0.0.1"), Client(address="10.0.0.2")


async def test_pixels_of_a_body_are_those_decoded_when_the_engine_asks(
    media_path: MakePath,
) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        held, watcher = arrivals.start(ANNA, FILES[0])
        await arrivals.started(watcher)
        assert arrivals.value(EARLY) == arrivals.value(DECODES) == 1
        found = await arrivals.show(held, FILES[0])
        np.testing.assert_array_equal(found, decoded(FILES[0]))
        assert arrivals.value(DECODES) == 1, "an image is decoded once"
        assert arrivals.value(BUFFERED) == 0, "its pixels are the engine's"
        assert watcher is not None
        watcher.close()
        assert arrivals.value(UNUSED) == arrivals.value(RENEWALS) == 0
        _, watcher = arrivals.start(ANNA, FILES[0])
        assert watcher is not None
        assert watcher._task is None, "an image like one before costs a look"


async def test_pixels_on_their_way_are_waited_for(media_path: MakePath) -> None:
    """The body is read as soon as the image has a name, or while it is decoded."""
    async with media_path() as path:
        arrivals = Arrivals(path)
        for number, data in enumerate(FILES, 1):
            held, watcher = arrivals.start(ANNA, data)
            assert watcher is not None
            while not watcher._images or (number % 2 and arrivals.value(DECODES) < number):
                await asyncio.sleep(0)
            await arrivals.show(held, data)
            watcher.close()
            assert arrivals.value(EARLY) == arrivals.value(DECODES) == number
        assert arrivals.value("saccade_headers_read_total") == len(FILES)
        assert arrivals.value(UNUSED) == arrivals.value(RENEWALS) == 0


async def test_the_newest_image_is_first(
    media_path: MakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        headers, order = path.media.decoders.pool.headers, list[bytes]()
        read = headers.read_header

        async def noted(name: bytes, data: bytes, requester: Requester) -> Any:
            order.append(name)
            return await read(name, data, requester)

        monkeypatch.setattr(headers, "read_header", noted)
        _, watcher = arrivals.start(ANNA, *FILES)
        await arrivals.started(watcher)
        assert order == [digest(data) for data in reversed(FILES)]
        _, late = arrivals.start(ANNA, *(encode(noise(192, 192, seed)) for seed in (10, 11, 12)))
        assert late is not None
        late.end_body()
        await arrivals.started(late)
        assert order[len(FILES) :] == [digest(encode(noise(192, 192, 12)))]


async def test_a_body_of_another_tenant_drops_what_was_started(spec: FamilySpec) -> None:
    """Code of an earlier image in a worker learns nothing of the body's, and has no say in it."""
    async with paths_of(spec, holed_fork_servers)() as path:
        arrivals = Arrivals(path)
        for code in (holed.SPY, holed.LIE):
            await show(path, ANNA, holed.with_code(encode(noise(64, 64)), code))
        held, watcher = arrivals.start(ANNA, SECRET)
        await arrivals.started(watcher)
        dump = holed.with_code(LARGE, holed.TELL)
        assert not tells(await show(path, ANNA, dump)), "before it is known whose the body is"
        np.testing.assert_array_equal(
            await arrivals.show(held, SECRET, "hers"), decoded(SECRET), "believed nothing"
        )
        assert not tells(await show(path, ANNA, dump))
        assert arrivals.value(UNUSED) == 1


async def test_workers_are_kept_where_the_tenant_is_the_probable_one(media_path: MakePath) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        for data in FILES:
            held, watcher = arrivals.start(ANNA, data)
            await arrivals.started(watcher)
            await arrivals.show(held, data)
        assert arrivals.value(EARLY) == arrivals.value(DECODES) == len(FILES)
        assert arrivals.value(RENEWALS) == 0


async def test_an_image_with_wishes_is_decoded_as_wished(media_path: MakePath) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        held, watcher = arrivals.start(ANNA, FILES[0])
        await arrivals.started(watcher)
        small = await arrivals.show(held, FILES[0], budget=Budget(max_pixels=64 * 64))
        assert small.shape == (64, 64, 3)
        assert watcher is not None
        watcher.close()
        assert (arrivals.value(DECODES), arrivals.value(UNUSED)) == (2, 1)


async def test_a_body_that_is_cut_off_leaves_nothing(media_path: MakePath) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        files = [encode(noise(160, 160, seed)) for seed in range(100, 140)]
        _, watcher = arrivals.start(ANNA, *files)
        assert watcher is not None
        assert len(watcher._waiting) <= 4, "older ones are left to the request"
        while arrivals.value(EARLY) < 2:  # one is done, and one is in work
            await asyncio.sleep(0)
        assert arrivals.value(BUFFERED) > 0
        running = [image.task for image in watcher._images.values()]
        watcher.close()
        await asyncio.wait((*running, *arrivals.watch.running))
        await asyncio.sleep(0)
        assert arrivals.value(EARLY) == 2
        assert arrivals.value(BUFFERED) == 0
        assert path.media.decoders.early == {}
        await arrivals.show(BufferedBody(arrivals.bodies, BERT), FILES[0])


async def test_a_client_whose_early_decodes_are_in_vain_gets_no_more(media_path: MakePath) -> None:
    """Such as images in fields that are ignored."""
    async with media_path() as path:
        arrivals = Arrivals(path)
        for seed in range(MAX_UNUSED):
            _, watcher = arrivals.start(ANNA, encode(noise(192, 192, 200 + seed)))
            await arrivals.started(watcher)
            assert watcher is not None
            await watcher.settle("")
            watcher.close()
        assert arrivals.value(EARLY) == arrivals.value(UNUSED) == MAX_UNUSED
        assert arrivals.start(ANNA, FILES[0])[1] is None
        assert arrivals.start(BERT, FILES[0])[1] is not None
        assert path.media.decoders.early == {}


async def test_nothing_is_started_for_a_client_over_its_limits(media_path: MakePath) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path, max_requests=1)
        with arrivals.permits.acquire(BERT):
            _, watcher = arrivals.start(ANNA, *FILES)
            await arrivals.started(watcher)
        arrivals.bodies.limit = 100_000
        held, _ = arrivals.start(BERT)
        held.resize(90_000)
        _, watcher = arrivals.start(BERT, encode(noise(192, 192, 300)))
        await arrivals.started(watcher)
        assert arrivals.value(EARLY) == arrivals.value(DECODES) == 0
        assert arrivals.value("saccade_headers_read_total") == 0
        assert arrivals.value(BUFFERED) == 90_000


@pytest.mark.parametrize(
    "data", [b"\x89PNG" + bytes(100_000), b"%PDF-1.7" + bytes(100_000), bytes(100_000)]
)
async def test_what_is_no_image_is_left_to_the_request(media_path: MakePath, data: bytes) -> None:
    async with media_path() as path:
        arrivals = Arrivals(path)
        _, watcher = arrivals.start(ANNA, data)
        await arrivals.started(watcher)
        assert arrivals.value(EARLY) == arrivals.value(BUFFERED) == 0
