"""New images decoded while their bodies arrive, one at a time for each body, the newest first.

What is started counts only once the body was read, and belongs to its tenant. Until then nothing of
it is known to others: image workers that have the bytes read no other's. The engine asks for pixels
as ever, and gets those that are there. An early decode never fails a request: without its pixels,
the image is decoded when the engine asks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import suppress
from dataclasses import replace
from math import prod

import pybase64
from blake3 import blake3
from cachetools import LRUCache, TTLCache

from saccade.core.client import Client
from saccade.core.errors import RequestError
from saccade.edge.body import BufferedBody
from saccade.front.request_manager import RequestManager
from saccade.media.content import Probe, digest, identify_soon
from saccade.media.kind import IMAGES
from saccade.media.sources.fairness import Requester
from saccade.media.sources.source import DEFAULT_BUDGET
from saccade.media.workers.decode_queue import Job
from saccade.media.workers.orders import MAX_RETURNED
from saccade.media.workers.worker_slots import UNSETTLED
from saccade.plugins.early_decode.image_finder import ImageFinder, Text

MAX_WAITING = 4
"""Images of a body that wait for the one before. Older ones are decoded when the engine asks."""
MAX_UNUSED, UNUSED_SECONDS = 3, 600.0
"""Bodies in a row whose early decodes were in vain, after which a client gets none for so long."""
MAX_CLIENTS = MAX_FINGERPRINTS = 1 << 12
SAMPLES, SAMPLE_BYTES = 16, 32
"""Of a text, what its fingerprint covers beside its length."""

_numbers = itertools.count()


class EarlyDecodes:
    """Watches the bodies of one server."""

    def __init__(self, front: RequestManager) -> None:
        self.media = front.intake.media
        self.metrics = front.metrics
        self.permits = front.permits
        self.running: set[asyncio.Task[None]] = set()
        self._fingerprints: LRUCache[bytes, bool] = LRUCache(MAX_FINGERPRINTS)
        self._unused: TTLCache[tuple[str, str], int] = TTLCache(MAX_CLIENTS, UNUSED_SECONDS)
        """By a client's key and address: bodies in a row."""

    def __call__(self, body: BufferedBody) -> ArrivingBody | None:
        """Return a watcher for a body, unless its client's images are not decoded early."""
        unused = self._unused.get(_name(body.client), 0)
        if not self.media.spec.sees_images or unused >= MAX_UNUSED:
            return None
        return ArrivingBody(self, body)

    def is_new(self, client: Client, text: Text) -> bool:
        """Return False if an image like this one has arrived before.

        Most images of a chat have. They cost a look at some of their bytes.
        """
        name = blake3(repr((_name(client), _fingerprint(text))).encode()).digest()
        if name in self._fingerprints:
            return False
        self._fingerprints[name] = True
        return True

    def count_use(self, client: Client, used: bool) -> None:
        """Count a body with early decodes, and whether any was of use."""
        unused = 0 if used else self._unused.get(_name(client), 0) + 1
        self._unused[_name(client)] = unused
        self.metrics.inc("saccade_early_decodes_unused_total", not used)


class EarlyImage:
    """One image, and its decode. `used`: its pixels went to the engine."""

    def __init__(self, body: ArrivingBody, data: bytes, name: bytes) -> None:
        self.digest = name
        self.nbytes = len(data)  # buffered for it now
        self.used = False
        self.probe: asyncio.Future[Probe | None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._job: Job | None = None
        self._pixels = b""
        self.task = asyncio.create_task(self._decode(data))
        self.task.add_done_callback(self._end)

    async def _decode(self, data: bytes) -> None:
        """Read the header, and decode the image as a chat without wishes shows it."""
        server = self._body.server
        media, pool = server.media, server.media.decoders.pool
        with suppress(RequestError):
            pool.check_refused(self._body.probable, self.digest)
            probe = await pool.headers.read_header(self.digest, data, self._body.requester)
            self.probe.set_result(probe)
            sized = await identify_soon(self.digest, probe, DEFAULT_BUDGET, "", media.spec)
            media.limits.check(sized.recipe.canvas, probe, len(data), sized.recipe)
            nbytes = 3 * prod(sized.recipe.canvas)
            if nbytes > MAX_RETURNED:
                return
            self.nbytes += nbytes
            self._body.count()
            requester = self._body.requester  # which may be settled by now
            job = Job(self.digest, data, probe, sized.recipe, requester.client, requester.request)
            self._job = replace(job, tenant=requester.tenant, returned=True)
            server.metrics.inc("saccade_early_decodes_total")
            self._pixels = await pool.decode(self._job)
            self._job = replace(self._job, data=b"")

    def _end(self, _: asyncio.Task[None]) -> None:
        if not self.probe.done():
            self.probe.set_result(None)
        self.nbytes = len(self._pixels)
        self._body.count()

    def settle(self, tenant: str) -> None:
        """Take a decode that waits for the tenant's."""
        if self._job is not None and not self._job.running:
            self._job.tenant = tenant

    async def write_to(self, target: memoryview, job: Job) -> bool:
        """Answer `EarlyPixels`."""
        early = self._job
        if early is None or (job.recipe, job.region, job.frame) != (early.recipe, None, None):
            return False
        await asyncio.wait((self.task,))
        if len(self._pixels) != len(target):  # it failed, or they were used
            return False
        target[:] = self._pixels
        assert self._job is not None
        job.ms, job.ended = self._job.ms, self._job.ended
        self.used = True
        self.release()
        return True

    def release(self) -> None:
        """Drop the pixels, and what is still being done for them."""
        self.task.cancel()
        self._pixels = b""
        self.nbytes = 0
        self._body.count()


class ArrivingBody:
    """Answers `BodyWatcher` for one body."""

    def __init__(self, server: EarlyDecodes, body: BufferedBody) -> None:
        self.server = server
        self.probable = body.client.tenant("")
        tenant = f"{self.probable}{UNSETTLED}{next(_numbers)}"
        self.requester = Requester(body.client.share(""), body.client.name, tenant=tenant)
        self._client = body.client
        self._share = BufferedBody(body.bodies, body.client)
        self._finder = ImageFinder()
        self._waiting: deque[Text] = deque(maxlen=MAX_WAITING)
        self._images: dict[bytes, EarlyImage] = {}
        self._task: asyncio.Task[None] | None = None
        self._tenant: str | None = None  # once settled

    def feed(self, chunk: bytes) -> None:
        """Start on the newest of the images that these bytes complete."""
        for text in self._finder.feed(chunk):
            if self.server.is_new(self._client, text):
                self._waiting.append(text)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
            self.server.running.add(self._task)
            self._task.add_done_callback(self.server.running.discard)

    def end_body(self) -> None:
        """Leave only the newest image waiting: the others are opened with the request."""
        while len(self._waiting) > 1:
            self._waiting.popleft()

    async def _run(self) -> None:
        while self._waiting:
            text = self._waiting.pop()
            with suppress(RequestError, ValueError):
                self.server.permits.check(self._client)
                await self._start(text)

    async def _start(self, text: Text) -> None:
        """Name an image, and decode it unless its tenant has sent it before. Raises ValueError for
        what is not base64.
        """
        reader = self.server.media.reader
        nbytes = sum(map(len, text))
        reader.inline.check_size(nbytes * 3 // 4)
        self._share.resize(self._num_buffered + nbytes * 2)
        data, name = await asyncio.to_thread(_read, text)
        text.clear()
        ignored = self._tenant is not None or not data.startswith(IMAGES)
        if ignored or name in self._images or reader.is_known(name, self.probable):
            self.count()
            return
        image = self._images[name] = EarlyImage(self, data, name)
        del data
        await asyncio.wait((image.task,))

    @property
    def _num_buffered(self) -> int:
        return sum(image.nbytes for image in self._images.values())

    def count(self) -> None:
        """Count the bytes of images and pixels. Raises as `BufferedBody.check` for more."""
        self._share.resize(self._num_buffered)

    async def settle(self, tenant: str) -> None:
        """Answer `BodyWatcher`: take headers and pixels for the tenant's, or drop them."""
        if self._tenant is not None:
            return
        self._tenant = tenant
        self._waiting.clear()
        if tenant != self.probable:
            self.close()
            return
        media, unsettled = self.server.media, self.requester.tenant
        self.requester = replace(self.requester, tenant=tenant)
        for image in [*self._images.values()]:
            if (probe := await image.probe) is not None:
                with suppress(RequestError):
                    media.seen.put(image.digest, False, tenant, probe)
                media.decoders.early.setdefault((tenant, image.digest), image)
                image.settle(tenant)
        media.decoders.pool.settle(unsettled, tenant)

    def close(self) -> None:
        """Answer `BodyWatcher`."""
        self._waiting.clear()
        images, self._images = self._images, {}
        early = self.server.media.decoders.early
        for name, image in images.items():
            if early.get((self.probable, name)) is image:
                del early[self.probable, name]
            image.release()
        if self._task is not None:
            self._task.cancel()
        if images:
            self.server.count_use(self._client, any(image.used for image in images.values()))
        self._share.resize(0)


def _name(client: Client) -> tuple[str, str]:
    return client.name, client.address


def _fingerprint(text: Text) -> tuple[int, bytes]:
    length = sum(map(len, text))
    steps = [length * index // SAMPLES for index in range(SAMPLES)]
    samples, start = [], 0
    for chunk in text:
        end = start + len(chunk)
        samples += [
            chunk[at - start : at - start + SAMPLE_BYTES] for at in steps if start <= at < end
        ]
        start = end
    return length, b"".join([*samples, text[-1][-SAMPLE_BYTES:]])


def _read(text: Text) -> tuple[bytes, bytes]:
    data = pybase64.b64decode(b"".join(text), validate=True)
    return data, digest(data)
