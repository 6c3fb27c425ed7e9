"""Decodes new images while the rest of their body arrives: one at a time per body, newest first.

The tenant of an image may depend on fields that have not arrived yet. Until the body has been read,
the results are therefore not visible to any request, and an image worker that has the bytes reads
no others. The engine requests pixels as usual, and gets those that are ready. An early decode never
fails a request: without its pixels, the image is decoded when the engine requests it.
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
"""Maximum queued images per body. Older ones are decoded only when the engine requests them."""
MAX_UNUSED, UNUSED_SECONDS = 3, 600.0
"""After this many consecutive bodies whose early decodes were unused, the client's images are not
decoded early for UNUSED_SECONDS.
"""
MAX_CLIENTS = MAX_FINGERPRINTS = 1 << 12
SAMPLES, SAMPLE_BYTES = 16, 32
"""Number and size of the samples of an image's base64 in its fingerprint, which also contains the
length.
"""

_numbers = itertools.count()


class EarlyDecodes:
    """Creates a watcher for each request body of a server."""

    def __init__(self, front: RequestManager) -> None:
        self.media = front.intake.media
        self.metrics = front.metrics
        self.permits = front.permits
        self.running: set[asyncio.Task[None]] = set()
        self._fingerprints: LRUCache[bytes, bool] = LRUCache(MAX_FINGERPRINTS)
        self._unused: TTLCache[tuple[str, str], int] = TTLCache(MAX_CLIENTS, UNUSED_SECONDS)
        """By the client's key and address, the number of consecutive bodies with unused early
        decodes.
        """

    def __call__(self, body: BufferedBody) -> ArrivingBody | None:
        """Return a watcher for the body, or None if the client's images are not decoded early."""
        unused = self._unused.get(_name(body.client), 0)
        if not self.media.spec.sees_images or unused >= MAX_UNUSED:
            return None
        return ArrivingBody(self, body)

    def is_new(self, client: Client, text: Text) -> bool:
        """Return False if the client has probably sent this image before, as is the case for most
        images of a chat. Reads only samples of the base64.
        """
        name = blake3(repr((_name(client), _fingerprint(text))).encode()).digest()
        if name in self._fingerprints:
            return False
        self._fingerprints[name] = True
        return True

    def count_use(self, client: Client, used: bool) -> None:
        """Count a body with early decodes. `used` is True if at least one of them was used."""
        unused = 0 if used else self._unused.get(_name(client), 0) + 1
        self._unused[_name(client)] = unused
        self.metrics.inc("saccade_early_decodes_unused_total", not used)


class EarlyImage:
    """One image of a body, and its decode.

    used: whether the engine has got its pixels.
    """

    def __init__(self, body: ArrivingBody, data: bytes, name: bytes) -> None:
        self.digest = name
        self.nbytes = len(data)  # currently buffered
        self.used = False
        self.probe: asyncio.Future[Probe | None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._job: Job | None = None
        self._pixels = b""
        self.task = asyncio.create_task(self._decode(data))
        self.task.add_done_callback(self._end)

    async def _decode(self, data: bytes) -> None:
        """Read the header, and decode the image as for a chat without image options."""
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
        """Assign a queued decode to a tenant, which makes its results usable."""
        if self._job is not None and not self._job.running:
            self._job.tenant = tenant

    async def write_to(self, target: memoryview, job: Job) -> bool:
        """Copy the decoded pixels to `target`. Implements `EarlyPixels.write_to`."""
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
        """Drop the pixels, and cancel a decode in progress."""
        self.task.cancel()
        self._pixels = b""
        self.nbytes = 0
        self._body.count()


class ArrivingBody:
    """The `BodyWatcher` of one body."""

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
        """Queue the images that these bytes complete, and start decoding the newest one."""
        for text in self._finder.feed(chunk):
            if self.server.is_new(self._client, text):
                self._waiting.append(text)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
            self.server.running.add(self._task)
            self._task.add_done_callback(self.server.running.discard)

    def end_body(self) -> None:
        """Keep only the newest image in the queue. The engine requests the others later."""
        while len(self._waiting) > 1:
            self._waiting.popleft()

    async def _run(self) -> None:
        while self._waiting:
            text = self._waiting.pop()
            with suppress(RequestError, ValueError):
                self.server.permits.check(self._client)
                await self._start(text)

    async def _start(self, text: Text) -> None:
        """Hash an image, and start decoding it unless its tenant has sent it before.

        Raises ValueError if the text is not valid base64.
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
        """Count the bytes of images and pixels against the memory budget. Raises Overloaded if they
        exceed it.
        """
        self._share.resize(self._num_buffered)

    async def settle(self, tenant: str) -> None:
        """Assign headers and pixels to the tenant. If it is not the expected tenant, drop them."""
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
        """Release all images and pixels that were not used."""
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
