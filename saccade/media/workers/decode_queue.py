"""The order of decodes, and their memory: turns between clients and between a client's requests,
small images first, under one memory budget.

Owns the waiting jobs. Work is priced by its decoded pixels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from saccade.core.config import MIB
from saccade.core.errors import ImageError
from saccade.core.recipe import Box, PreprocessParams
from saccade.media.content import VIDEO, Probe
from saccade.media.formats.pixel_operations import RESAMPLERS

BYTES_PER_PIXEL = {
    "JPEG": 10,
    "JPEG CMYK": 13,
    "PNG": 9,
    "GIF": 9,
    "BMP": 9,
    "TIFF": 13,
    "WEBP": 20,
    "AVIF": 20,
    "HEIF": 20,
    "JPEG2000": 32,
    "ICO": 16,
    "PPM": 16,
    VIDEO: 64,
}
"""Most memory that decoding takes per pixel of the source, by format or format and mode: a little
more than was measured. A JPEG's is that of a progressive one in 4:4:4; libwebp and Pillow hold a
WebP five times, and a video's decoder up to sixteen frames that others are made of.
"""
THREADS = {"HEIF": 1024}
"""Threads that decoding may begin, one after another, by format: libde265 begins one for each tile,
and a photo of 48 Mpx has 192.
"""
RESIZE_BYTES = 12
"""Memory per pixel of a target: the result of the second pass, before it is copied."""
STRIP_BYTES = 48 * MIB
"""Memory for the strip that is being converted and resized."""

PART = 16
"""Recipes of one order: of a long video, the first frames are there before the others are begun."""

OVERTAKEN = 8
"""How often jobs that fit into the memory that is left may go before one that has to wait for
more.
"""

_numbers = itertools.count()
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """One image to decode, or a video's frame number `frame`, and the recipe for its pixels.
    `digest` names the bytes, which belong to `tenant`.

    `client` and `request` identify the owner. Once done, `ms` is the time taken, and `ended` the
    `time.monotonic()` of the end.
    """

    digest: bytes
    data: bytes
    probe: Probe
    recipe: PreprocessParams
    client: str = ""
    request: str = ""
    number: int = field(default_factory=lambda: next(_numbers))
    running: bool = False
    overtaken: int = 0
    ms: float = 0.0
    ended: float = 0.0
    frame: int | None = None
    tenant: str = ""
    region: Box | None = None  # the part of the upright image that the recipe is for
    returned: bool = False  # the pixels are sent to the front

    @property
    def name(self) -> tuple[str, bytes]:
        """Return the key of jobs that can share one decode."""
        return self.tenant, self.digest

    @property
    def pixels(self) -> int:
        """Count the pixels to decode, which are the job's price."""
        return self.probe.height * self.probe.width


def decoding_bytes(probe: Probe, nbytes: int, recipes: Iterable[PreprocessParams]) -> int:
    """Return the memory for decoding an image of `nbytes` by these recipes."""
    pixels = probe.height * probe.width
    usual = BYTES_PER_PIXEL.get(probe.format, 0)
    per_pixel = BYTES_PER_PIXEL.get(f"{probe.format} {probe.mode}", usual)
    resized = 0
    for recipe in recipes:
        height, width = probe.upright
        if own := recipe.own:
            resized += own.source_bytes * pixels + own.other_bytes
            resized += 3 * math.prod(own.size) if recipe.views else 0
            height, width = own.size
        resized += RESAMPLERS[recipe.resample].source_bytes * height * width
        for size in recipe.through:
            resized += 3 * height * size[1] + (RESIZE_BYTES + 3) * math.prod(size)
        for view in recipe.views:
            kept = RESIZE_BYTES + 3 * bool(view.tiles)
            resized += 3 * height * view.size[1] + kept * math.prod(view.size)
    return STRIP_BYTES + 2 * nbytes + per_pixel * pixels + resized


def check_memory(probe: Probe, nbytes: int, recipe: PreprocessParams, budget: int) -> None:
    """Raise ImageError if an image by itself needs more than `budget` bytes, for it is too large
    for any worker.
    """
    needed = decoding_bytes(probe, nbytes, [recipe])
    if needed > budget:
        raise ImageError(
            f"the image is a {probe.format} of {probe.width} x {probe.height} px, and decoding it "
            f"takes up to {needed / MIB:.0f} MiB of memory; the limit for image workers is "
            f"{budget / MIB:.0f} MiB: resize it, or start the server with a larger --tune "
            "decode_memory_mb=MIB",
            code="image_too_large",
        )


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """What an image may take."""

    arena: int  # bytes of shared memory
    memory: int  # bytes in image workers

    def check(
        self, canvas: tuple[int, int], probe: Probe, nbytes: int, recipe: PreprocessParams
    ) -> None:
        """Raise ImageError if the image exceeds shared memory or the workers' memory.

        Images within the model's bound fit. Rounding up to whole patches may pass the bound.
        """
        height, width = canvas
        if height * width * 3 > self.arena:
            raise ImageError(
                f"the image is {width} x {height} px after resizing, "
                f"{height * width * 3 / 2**20:.0f} MiB; shared memory holds "
                f"{self.arena / 2**20:.0f} MiB: set a smaller max_pixels, or start the "
                "server with a larger --tune arena_mb=MIB",
                code="image_too_large",
            )
        check_memory(probe, nbytes, recipe, self.memory)


class Shares(Generic[Key]):
    """Fair queueing: the least served is first, and idle time saves up no turns.

    All times are virtual: sums of prices.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._starts: dict[Key, float] = {}
        self._waiting: Counter[Key] = Counter()

    def enter(self, key: Key) -> None:
        """Add one waiting job of `key`."""
        if not self._waiting[key]:
            self._starts[key] = max(self._clock, self._starts.get(key, 0.0))
        self._waiting[key] += 1

    def end_time(self, key: Key, price: float) -> float:
        """Return when a job at that price would end, if served at once."""
        return self._starts[key] + price

    def leave(self, key: Key, price: float) -> None:
        """Take one waiting job of `key` out. A price of 0 means that it was left unserved."""
        if price:
            self._starts[key] += price
            self._clock = max(self._clock, self._starts[key])
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
        past = [
            one
            for one, start in self._starts.items()
            if one not in self._waiting and start <= self._clock
        ]
        for one in past:
            del self._starts[one]


class JobQueue:
    """The waiting jobs, and the choice of the next."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._jobs: dict[Job, None] = {}
        self._clients: Shares[str] = Shares()
        self._requests: Shares[tuple[str, str]] = Shares()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self._clients.enter(job.client)
        self._requests.enter((job.client, job.request))

    def remove(self, job: Job, price: float = 0.0) -> None:
        """Take a job out, served at a price or unwanted."""
        del self._jobs[job]
        self._clients.leave(job.client, price)
        self._requests.leave((job.client, job.request), price)

    def take_jobs(self, memory_in_use: int, busy: Collection[tuple[str, bytes]]) -> list[Job]:
        """Take the next job and all jobs with its name, as far as memory goes. The list may be
        empty while memory is in use. Names in `busy` are being decoded already.
        """
        free = self._budget - memory_in_use
        for job in self._order(busy):
            if decoding_bytes(job.probe, len(job.data), [job.recipe]) <= free or not memory_in_use:
                return self._take(job, free)
            job.overtaken += 1
            if job.overtaken > OVERTAKEN:
                break
        return []

    def _take(self, first: Job, free: int) -> list[Job]:
        batch, recipes = [first], [first.recipe]
        for job in self._jobs:
            if job is first or job.name != first.name or len(batch) == PART:
                continue
            if job.returned and any(each.returned for each in batch):
                continue
            if decoding_bytes(first.probe, len(first.data), [*recipes, job.recipe]) <= free:
                batch.append(job)
                recipes.append(job.recipe)
        for job in batch:
            self.remove(job, first.pixels if job is first else 0.0)
        return batch

    def _order(self, busy: Collection[tuple[str, bytes]]) -> list[Job]:
        """Sort the jobs that may be served, the next first. They are ordered by the client's turn,
        the request's turn, small images, age.
        """

        def turn(job: Job) -> tuple[float, float, int]:
            return (
                self._clients.end_time(job.client, least[job.client]),
                self._requests.end_time((job.client, job.request), job.pixels),
                job.number,
            )

        waiting = [job for job in self._jobs if job.name not in busy]
        least: dict[str, int] = {}
        for job in waiting:
            least[job.client] = min(job.pixels, least.get(job.client, job.pixels))
        return sorted(waiting, key=turn)
