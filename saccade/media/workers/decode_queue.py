"""The queue of decode jobs. It is fair between clients and between the requests of one client,
prefers small images, and limits the memory of all running jobs.

A large image waits until there is enough memory, and is overtaken by a limited number of smaller
ones. Meanwhile, and while it is decoded, a reserve of memory is used for small images of clients
that have none in progress.

The cost of a job is the number of pixels that are decoded.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from saccade.core.config import MIB
from saccade.core.errors import ImageError
from saccade.core.recipe import Box, PreprocessParams
from saccade.media.content import VIDEO, Probe

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
"""Maximum memory for decoding, per pixel of the source, by format or by format and mode. Values are
slightly above the measurements. JPEG is measured with progressive 4:4:4 images. libwebp and Pillow
hold five copies of a WebP image. A video decoder holds up to sixteen reference frames.
"""
RESAMPLER_BYTES = {"pillow_bicubic": 7, "pillow_lanczos": 7}
"""Additional memory for resizing, per pixel of the source, by resize function. Pillow holds the
array (3 bytes) and an image of its own (4 bytes).
"""
THREADS = {"HEIF": 1024}
"""How many threads decoding may start in total, by format. libde265 starts one per tile, and a
photo of 48 Mpx has 192 tiles.
"""
RESIZE_BYTES = 12
"""Memory per resized pixel: the output of the second resizing pass, before it is copied."""
STRIP_BYTES = 48 * MIB
"""Memory for the strip of an image that is being converted and resized."""

PART = 16
"""Maximum jobs in one order. With a long video, its first frames are ready before later ones are
started.
"""

OVERTAKEN = 8
"""How many times smaller jobs can overtake a job that waits for memory."""

RESERVE_DIVISOR = 8
"""The reserve is this fraction (1 / 8) of the memory for decoding, in addition to it: with the
defaults 320 MiB, enough for a JPEG of 24 megapixels.
"""

_numbers = itertools.count()
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """An image, or one frame of a video, that is to be decoded and resized."""

    digest: bytes  # blake3 hash of `data`
    data: bytes
    probe: Probe
    recipe: PreprocessParams
    client: str = ""
    request: str = ""
    number: int = field(default_factory=lambda: next(_numbers))
    running: bool = False
    overtaken: int = 0  # how many jobs were started before this one, which waited for memory
    ms: float = 0.0  # decoding time, once the job has finished
    ended: float = 0.0  # `time.monotonic()` when it finished
    frame: int | None = None  # index of the frame in a video
    tenant: str = ""
    region: Box | None = None  # the part of the upright image to resize
    returned: bool = False  # whether the pixels are returned to the front end

    @property
    def name(self) -> tuple[str, bytes]:
        """The key of jobs that can share one decode."""
        return self.tenant, self.digest

    @property
    def pixels(self) -> int:
        """The number of pixels to decode. This is the job's cost."""
        return self.probe.height * self.probe.width


@dataclass(frozen=True, slots=True)
class JobBatch:
    """Jobs for the same bytes, which share one decode, and the memory for this."""

    jobs: list[Job]
    memory: int  # bytes for decoding and resizing
    reserved: bool  # whether it uses the reserve

    @property
    def first(self) -> Job:
        return self.jobs[0]


def decoding_bytes(probe: Probe, nbytes: int, recipes: Iterable[PreprocessParams]) -> int:
    """Return the bytes of memory for decoding an image once, and resizing it for each of `recipes`.

    nbytes: the size of the encoded image.
    """
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
        resized += RESAMPLER_BYTES.get(recipe.resample, 0) * height * width
        for size in recipe.through:
            resized += 3 * height * size[1] + (RESIZE_BYTES + 3) * math.prod(size)
        for view in recipe.views:
            kept = RESIZE_BYTES + 3 * bool(view.tiles)
            resized += 3 * height * view.size[1] + kept * math.prod(view.size)
    return STRIP_BYTES + 2 * nbytes + per_pixel * pixels + resized


def check_memory(probe: Probe, nbytes: int, recipe: PreprocessParams, budget: int) -> None:
    """Raise ImageError if decoding one image needs more than `budget` bytes of memory.

    nbytes: the size of the encoded image.
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
    """The maximum bytes in shared memory, and in a worker's memory, for one image."""

    arena: int  # bytes of shared memory
    memory: int  # bytes in image workers

    def check(
        self, canvas: tuple[int, int], probe: Probe, nbytes: int, recipe: PreprocessParams
    ) -> None:
        """Raise ImageError if the image does not fit in shared memory or in the workers' memory.

        Shared memory has space for the model's largest image, but rounding up to whole patches may
        exceed that size.
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
    """Start-time fair queueing, in which the key that was served least is next.

    Keys that were idle do not accumulate credit. All times are virtual: they are sums of job costs.
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
        """Return the virtual time at which a job with cost `price` would finish if it started
        now.
        """
        return self._starts[key] + price

    def leave(self, key: Key, price: float) -> None:
        """Remove one waiting job of `key`, and charge its cost.

        price: the cost, or 0 if the job was not started.
        """
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
    """Orders the waiting jobs, and decides which can start.

    budget: the maximum memory of running jobs, in bytes, without the reserve.
    """

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
        """Remove a job that was started or cancelled.

        price: the cost of a started job, or 0.
        """
        del self._jobs[job]
        self._clients.leave(job.client, price)
        self._requests.leave((job.client, job.request), price)

    def take_jobs(
        self,
        running: Collection[JobBatch],
        has_worker: Callable[[str], bool] = lambda _: True,
    ) -> JobBatch | None:
        """Remove and return the next job, with other jobs for the same bytes that fit in memory.

        Returns None if no job fits until running ones finish. Jobs for bytes that are being decoded
        are skipped.

        has_worker: returns True if a client may start a job.
        """
        in_use = sum(batch.memory for batch in running if not batch.reserved)
        free = self._budget - in_use
        clients = {batch.first.client for batch in running}
        reserve_in_use = any(batch.reserved for batch in running)
        reserve = 0 if reserve_in_use else self._budget // RESERVE_DIVISOR
        passed: list[Job] = []
        for job in self._order({batch.first.name for batch in running}):
            if not has_worker(job.client):
                continue
            needed = decoding_bytes(job.probe, len(job.data), [job.recipe])
            can_overtake = all(each.overtaken < OVERTAKEN for each in passed)
            if can_overtake and (needed <= free or not in_use):
                for each in passed:
                    each.overtaken += 1
                return self._take(job, free, reserved=False)
            if needed <= reserve and job.client not in clients:
                return self._take(job, reserve, reserved=True)
            passed.append(job)
        return None

    def _take(self, first: Job, free: int, reserved: bool) -> JobBatch:
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
        memory = decoding_bytes(first.probe, len(first.data), recipes)
        return JobBatch(batch, memory, reserved)

    def _order(self, busy: Collection[tuple[str, bytes]]) -> list[Job]:
        """Return the jobs that can be started, sorted by when they should be.

        The sort keys are the virtual end times of the client and of the request, then the age of
        the job.
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
