"""The scheduler of a server that only encodes: each request gets the embedding of one image.

    waiting ──image encoded, space──▶ running ──copied to the arena──▶ sending ──abort──▶ freed

One part of the arena is reserved for embeddings to be sent, and pixels use the rest, so that
neither can fill the whole arena. `image_scheduler.py` schedules images as it does for a language
model: an image is encoded once for any number of requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.config import EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.plan import Deliver, FreeMemory, Place, Plan, StepResult
from saccade.core.types import Delta, ImageKey, ImageOutcome, Request
from saccade.engine.schedulers import build_embeddings, build_tiles, limits_of
from saccade.sched.builder import PlanBuilder
from saccade.sched.images.image_scheduler import ImageScheduler
from saccade.sched.images.slots import Allocator, Notices, aligned
from saccade.sched.images.tiles import TileIndex
from saccade.sched.limits import Counts, SchedulerLimits, image_failure
from saccade.sched.sequence import Sequence, State
from saccade.sched.turns import TurnQueue, in_turn


@dataclass(frozen=True, slots=True)
class _Delivery:
    """An embedding that is being copied to the arena, and its offset there."""

    sequence: Sequence
    offset: int


class EncodeScheduler:
    """A scheduler whose results are embeddings. Implements `protocol.Scheduler`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        embeddings: EmbeddingCache,
        tiles: TileIndex | None = None,
    ) -> None:
        self.embeddings = embeddings
        self.counts = Counts()
        half = limits.arena_bytes // 2
        self.limits = replace(limits, arena_bytes=half)
        self.image_scheduler = ImageScheduler(self.limits, embeddings, self.counts, tiles=tiles)
        self.running: list[Sequence] = []  # those whose embeddings are being copied
        self.waiting = TurnQueue()
        self._base = self.image_scheduler.slots.size
        self._capacity = limits.arena_bytes - self._base
        self._memory = Allocator(self._capacity)
        self._ids: dict[str, Sequence] = {}
        self._told: dict[str, int] = {}  # by request, the offset of the embedding being sent
        self._flights: deque[tuple[Plan, list[_Delivery]]] = deque()
        self._unused: FreeMemory | None = None

    # ---- requests and pixels

    @property
    def idle(self) -> bool:
        """Whether all requests have finished, and the workers have released their slots."""
        return not (self._ids or self._flights or self._unused or self.image_scheduler.busy)

    def add_request(self, request: Request) -> list[Delta]:
        """Queue a request for the embedding of one image, under a new ID.

        Returns the final delta of a request that cannot be served, or else an empty list.
        """
        assert request.id not in self._ids and not request.grammar and len(request.images) == 1
        image = request.images[0]
        nbytes = image.num_tokens * self.embeddings.bytes_per_token
        if aligned(nbytes) > self._capacity or not self.image_scheduler.slots.fits(image):
            most = self._capacity // (1 << 20)
            error = (
                f"the image's embedding has {nbytes} bytes; the limit is {most} MiB for all "
                "embeddings: start the server with a larger --tune arena_mb=MIB"
            )
            return [Delta(request.id, finish="error", error=error, code="too_large")]
        if not self._consistent(request):
            error = "this image is cached with a different number of tokens"
            return [Delta(request.id, finish="error", error=error, code="wrong_settings")]
        sequence = Sequence(request, self.counts.requests)
        sequence.matched = 0
        self.counts.requests += 1
        self._ids[request.id] = sequence
        self.waiting.add(sequence)
        self.image_scheduler.join(sequence)
        self.image_scheduler.ask_early(sequence)
        return []

    def _consistent(self, request: Request) -> bool:
        """Return True if the cached information about the image agrees with the request.

        A client that sends a key without the image's bytes may claim anything.
        """
        image = request.images[0]
        others = (sequence.request.images[0] for sequence in self._ids.values())
        known = self.embeddings.num_tokens(image.key) in (None, image.num_tokens)
        return known and all(other == image for other in others if other.key == image.key)

    def abort(self, id: str) -> list[Delta]:
        """Remove a request whose client has disconnected or has received the embedding."""
        if (offset := self._told.pop(id, None)) is not None:
            self._memory.free(offset)
        return [self._finish(self._ids[id], Delta(id, finish="abort"))] if id in self._ids else []

    def fail_all(self, error: str) -> list[Delta]:
        """Fail all requests with this error, and return their final deltas."""
        return [
            self._finish(sequence, Delta(id, finish="error", error=error))
            for id, sequence in list(self._ids.items())
        ]

    def pixels_ready(
        self,
        key: ImageKey,
        pixels: bytes = b"",  # noqa: ARG002
        tiles: tuple[bytes, ...] = (),
    ) -> list[Delta]:
        """Record that the front end has decoded an image to the slot that `Notices.want` named.

        Ignores `pixels`, because requests contain the embedding's key.
        """
        self.image_scheduler.pixels_ready(key, tiles=tiles)
        return []

    def pixels_failed(self, key: ImageKey, error: str) -> list[Delta]:
        """Fail all requests for an image that the front end could not decode to its slot."""
        return [
            self._finish(sequence, Delta(sequence.request.id, finish="error", error=error))
            for sequence in self.image_scheduler.pixels_failed(key)
        ]

    def flush(self, embeddings: bool, disk: bool = True) -> None:
        """Drop unused embeddings and pixels. Embeddings on disk are only dropped if `disk`
        is True.
        """
        if embeddings:
            self.image_scheduler.flush(disk)

    def drop_pages(self, pages: int) -> int:  # noqa: ARG002
        """Do nothing, since there are no pages."""
        return 0

    def release_memory(self) -> None:
        """Make the next plan release the memory of freed embeddings."""
        self._unused = FreeMemory()

    def take_notices(self) -> Notices:
        """Return the pending notices for the front end, and clear them."""
        return self.image_scheduler.take_notices()

    # ---- plan

    def plan(self) -> Plan:
        """Return the plan of the next step, as in `protocol.Scheduler`."""
        builder, deliveries = self._draft()
        works = builder.works or self._unused is not None
        tower = self.image_scheduler.tower(False, False) if works or not self._flights else 0
        wait = not (works or tower or self._flights) and self.image_scheduler.waits_for_workers
        unused, self._unused = self._unused, None
        plan = builder.build(self.counts.steps, [], tower, wait, unused=unused)
        if not plan.empty:
            self.counts.steps += 1
            self._flights.append((plan, deliveries))
        return plan

    def _draft(self) -> tuple[PlanBuilder, list[_Delivery]]:
        builder = PlanBuilder(0)
        self.image_scheduler.begin_plan(builder)
        deliveries = self._deliver(builder)
        turns = in_turn(self.waiting, self.running, self.limits.max_running)
        self.image_scheduler.provide(chain(self.running, turns), lambda _: 0, builder)
        self.image_scheduler.end_plan()
        return builder, deliveries

    def _deliver(self, builder: PlanBuilder) -> list[_Delivery]:
        """Plan copies of embeddings to the arena, round-robin over requests with encoded images,
        while there is space.
        """
        found: list[_Delivery] = []
        exceed = not (self.running or self._flights)
        for sequence in list(in_turn(self.waiting, self.running, self.limits.max_running)):
            image = sequence.request.images[0]
            if not self.image_scheduler.showable(image.key):
                continue
            nbytes = image.num_tokens * self.embeddings.bytes_per_token
            offset = self._memory.allocate(nbytes)
            if offset is None:
                break
            run = sequence.admit(0, None, [], 0)
            place = self.image_scheduler.show(run, image, builder, (), exceed and not found)
            if place is None:  # there is no space on the device now
                sequence.preempt()
                sequence.matched = 0
                self._memory.free(offset)
                continue
            self._note(sequence, place)
            self.waiting.remove(sequence, served=True)
            self.running.append(sequence)
            builder.deliver.append(Deliver(image.key, image.num_tokens, self._base + offset))
            found.append(_Delivery(sequence, offset))
        return found

    def _note(self, sequence: Sequence, place: Place) -> None:
        key = sequence.request.images[0].key
        if (encoded := sequence.encoded.get(key)) is not None:
            missed, source, tiles = encoded
            sequence.found[0] = ImageOutcome(0, source, None, missed, tiles=tiles)
            return
        self.embeddings.count_lookup(place)
        self.counts.images_embedding += 1
        tier = "disk" if place == "staged" else place
        sequence.found[0] = ImageOutcome(0, "embedding", None, None, tier)

    # ---- apply

    def apply(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest plan in flight, and return the deltas for its requests."""
        plan, deliveries = self._flights.popleft()
        assert plan.step == result.step, "results come in the order of plans"
        # The results for images.
        for key, _, _ in result.encoded:
            self.image_scheduler.encoded(key)
        deltas = [
            self._finish(
                sequence, Delta(sequence.request.id, finish="error", error=error, code=code)
            )
            for key, why in result.failed
            for error, code in [image_failure(why)]
            for sequence in self.image_scheduler.encode_failed(key)
        ]
        for key, event in result.disk:
            if event == "not saved":
                self.embeddings.not_saved(key)
            else:
                self.image_scheduler.read_ended(key, event == "read")
        # Delivered embeddings finish their requests.
        for each in deliveries:
            sequence, request = each.sequence, each.sequence.request
            image = request.images[0]
            self.embeddings.unpin(image.key)
            if sequence.state is State.FINISHED:
                self._memory.free(each.offset)
                continue
            self._told[request.id] = each.offset
            nbytes = image.num_tokens * self.embeddings.bytes_per_token
            delta = Delta(
                request.id,
                finish="stop",
                images=sequence.outcomes(),
                admitted=time.monotonic(),
                embedding=(self._base + each.offset, nbytes),
            )
            deltas.append(self._finish(sequence, delta))
        return deltas

    def _finish(self, sequence: Sequence, delta: Delta) -> Delta:
        """Finish a sequence and return `delta`, its final one.

        If a plan in flight copies its image, the image stays pinned until the plan is applied.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence, served=False)
        sequence.finish()
        del self._ids[sequence.request.id]
        self.image_scheduler.leave(sequence)
        return delta

    # ---- for tests

    @property
    def unsent(self) -> frozenset[str]:
        """The IDs of requests whose embeddings have not been sent yet."""
        return frozenset(self._told)

    def audit(self) -> None:
        """Assert that all of the memory for embeddings is free, being copied to, or being sent."""
        self.image_scheduler.audit()
        copying = {each.offset for _, deliveries in self._flights for each in deliveries}
        assert self._memory.taken == copying | set(self._told.values())


def build_encode_scheduler(
    config: EngineConfig,
    spec: FamilySpec,
    saved: Iterable[tuple[ImageKey, int]],
    arena_bytes: int,
) -> EncodeScheduler:
    """Create the scheduler of an engine that only has a vision encoder."""
    limits = limits_of(config, spec, arena_bytes)
    embeddings = build_embeddings(config, spec, saved)
    return EncodeScheduler(limits, embeddings, build_tiles(spec, embeddings))
