"""Schedules the images of all requests. Each image has a state machine, from absent to used:

    absent ──ask──▶ asked ──pixels──▶ arrived ──begin──▶ encoding ──encoded──▶ ahead, unsaved
       ▲              │ failed, unwanted   │ space is needed sooner                │ shown, saved
       └──────────────┴────────────────────┘◀──────── evicted ────────────────────┐ ▼
                                                                                  device ◀─▶ host
                        disk ──read──▶ reading ──▶ staged ──shown──▶ device         └──────▶ disk

An image is "shown" when a plan uses its embedding in a chunk of a prompt. ahead: encoded, but not
shown yet. unsaved: encoded, but not written to disk yet. Both states start when an encoding ends,
and each ends independently. Until then the embedding is held on the device, and plans may use it.

This module manages the states asked, arrived, encoding, ahead and unsaved, and the arena's slots
(`slots.py`). `cache/embeddings.py` manages the tiers and reads from disk.

Resources are granted in order of urgency: to running sequences first, then to waiting ones in the
order of their turns. There is no deadlock, because the first missing image may take the resources
that it lacks: slots of pixels that arrived too early, and device memory of prefetched embeddings.
If a running sequence would otherwise be stuck, the device's budget may be exceeded. A slot that is
being written, or read by the vision encoder, stays in use until the front end or the workers report
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.plan import TOWER_RESTS, Encode, Move, PixelSlot, Place, Plan
from saccade.core.types import Image, ImageKey
from saccade.sched.builder import PlanBuilder
from saccade.sched.images.image_aliases import ImageAliases
from saccade.sched.images.in_flight import Fresh, ImageScan, InFlightImage
from saccade.sched.images.slots import Notices, PixelSlots
from saccade.sched.limits import Counts, SchedulerLimits
from saccade.sched.sequence import EncodedImage, Run, Sequence, Source

if TYPE_CHECKING:  # not imported unless a server needs them
    from saccade.sched.images.tiles import TileIndex
    from saccade.sched.step_pace import StepPace

PREFETCH_CHUNKS = 2
"""Images may be encoded if they are within this many chunks from a sequence's position."""

TOWER_STEPS = 8
"""If the step also decodes, it does at most 1/TOWER_STEPS of an image's encoding."""


class ImageScheduler:
    """Requests, reads and encodes each image once, however many sequences use it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        embeddings: EmbeddingCache,
        counts: Counts,
        pace: StepPace | None = None,
        tiles: TileIndex | None = None,
    ) -> None:
        """Start without images.

        pace: adapts the vision encoder's budget to measured times. None: the budget is constant.
        tiles: None unless the vision encoder encodes tiles independently.
        """
        self.slots = PixelSlots(limits.arena_bytes, limits.given_bytes)
        self._limits = limits
        self._prefetch_tokens = PREFETCH_CHUNKS * limits.longest_chunk
        self._embeddings = embeddings
        self._counts = counts
        self.pace = pace
        self._tiles = tiles
        self._users: dict[ImageKey, list[Sequence]] = {}
        self.aliases = ImageAliases(self._lives, self._users)
        self._under_way: dict[ImageKey, InFlightImage] = {}
        self._fresh: dict[ImageKey, Fresh] = {}
        self._asking = True  # in the last plan, every image that is needed soon could be requested
        self._unconstrained = True  # and no encoding was deferred for lack of space or time
        self._moves: list[Move] = list(embeddings.beyond_budget)
        self._want: list[tuple[ImageKey, PixelSlot]] = []
        self._unwanted: dict[ImageKey, None] = {}  # decodes to cancel, in order

    # ---- queries

    @property
    def busy(self) -> bool:
        """Return True if an encoding, a read from disk or a move is in progress or must be
        planned.
        """
        work = self._unsaved() or self._moves or self._embeddings.staged
        return bool(work) or self.waits_for_workers

    @property
    def waits_for_workers(self) -> bool:
        """Return True if an encoding or a read from disk is in progress."""
        return bool(self._patches_encoding() or self._embeddings.keys_being_read)

    def encodes_with(self, adapter: int) -> bool:
        """Return True if an image is being encoded with the adapter of this index."""
        under_way = self._under_way.values()
        return any(each.stage == "encoding" and each.adapter == adapter for each in under_way)

    def showable(self, key: ImageKey) -> bool:
        """Return True if the plan being made can use the image's embedding, given space on the
        device.
        """
        return key not in self._under_way and self._embeddings.ready(key)

    def missing(self, sequence: Sequence) -> ImageKey | None:
        """Return the first unavailable image that the sequence still needs, or None."""
        upcoming = sequence.upcoming(sequence.images_end)
        return next((image.key for _, image in upcoming if not self.showable(image.key)), None)

    def lacks(self, sequence: Sequence) -> bool:
        """Return True if the sequence still needs an image that is not available."""
        return self.missing(sequence) is not None

    # ---- adding and removing sequences

    def join(self, sequence: Sequence) -> None:
        """Register a new sequence as a user of its images."""
        if self.aliases.others:
            self.aliases.joined(sequence)
        for key in sequence.last_use:
            if sequence not in (users := self._users.setdefault(key, [])):
                users.append(sequence)

    def ask_early(self, sequence: Sequence) -> None:
        """Request a new sequence's images from the front end without waiting for the next plan.

        Does nothing if an earlier sequence could not request all of its images.
        """
        self._reclaim(sequence)
        for _, image in sequence.upcoming(sequence.images_end) if self._asking else ():
            key = image.key
            there = key in self._under_way or key in self.slots or self._embeddings.locate(key)
            if not there and not (
                self._in_flight() < self._limits.look_ahead and self._request_pixels(image)
            ):
                return

    def leave(self, sequence: Sequence) -> None:
        """Release the images of a sequence that has ended."""
        for key in sequence.last_use:
            self._users[key].remove(sequence)
            if not self._users[key]:
                del self._users[key]
            self.settle(key)

    def settle(self, key: ImageKey) -> None:
        """Release the image's slot, encoding or embedding if no sequence needs it any more.

        A write to the slot, an encoding or a read from disk has to end first.
        """
        if self._needed_by(key):
            return
        under_way = self._under_way.get(key)
        if under_way is not None and under_way.stage == "asked" and not under_way.unwanted:
            under_way.unwanted = True
            self._unwanted[key] = None
        elif under_way is not None and under_way.stage == "arrived":
            del self._under_way[key]
            self._release_slot(under_way)
        self._end_ahead(key)
        if key in self._embeddings.staged:
            self._moves.append(self._embeddings.unstage(key))

    def flush(self, disk: bool = True) -> None:
        """Evict embeddings and pixels that are not in use. The next plan contains the moves.

        disk: True to also clear the disk.
        """
        self._moves += self._embeddings.flush(disk)
        self.slots.drop_kept()
        if self._tiles is not None:
            self._tiles.forget()

    def drop_embeddings(self, nbytes: int) -> int:
        """Evict about `nbytes` of embeddings that are not in use. Return the number of bytes
        evicted.

        The next plan contains the moves.
        """
        moves = self._embeddings.shrink(nbytes)
        self._moves += moves
        return sum(move.num_tokens for move in moves) * self._embeddings.bytes_per_token

    def take_notices(self) -> Notices:
        """Return the updates for the front end since the last call, and clear them."""
        aliases = self.aliases.take_found() if self.aliases.found else ()
        notices = Notices(tuple(self._want), tuple(self._unwanted), aliases)
        self._want, self._unwanted = [], {}
        return notices

    # ---- events from the front end and the workers

    def pixels_ready(
        self,
        key: ImageKey,
        given: bool = False,
        pixels: bytes = b"",
        tiles: tuple[bytes, ...] = (),
    ) -> None:
        """Record that the front end has written an image to its slot, so that the image can be
        encoded.

        given: True if the slot contains an embedding from another server, instead of pixels.
        pixels: the hash of the pixels, or b"" if none was computed.
        tiles: the hashes of the image's tiles, if any.
        """
        under_way = self._under_way[key]
        assert under_way.stage == "asked", "pixels that were not asked for"
        self._unwanted.pop(key, None)
        if pixels and self.aliases.arrived(under_way.image, pixels) is not None:
            del self._under_way[key]
            self.slots.free(under_way.slot)
            self._counts.images_same += 1
            return
        under_way.stage, under_way.given = "arrived", given
        if tiles and self._tiles is not None:
            self._tiles.arrived(under_way.image, tiles)
        self.settle(key)

    def pixels_failed(self, key: ImageKey) -> list[Sequence]:
        """Free the slot of an image that the front end could not decode. Return the sequences that
        need the image.

        The result is empty if decoding was cancelled. If a sequence needs the image again by now,
        its pixels are requested again.
        """
        under_way = self._under_way.pop(key)
        assert under_way.stage == "asked", "pixels that were not asked for"
        self.slots.free(under_way.slot)
        self._unwanted.pop(key, None)
        return [] if under_way.unwanted else self._needed_by(key)

    def encoded(self, key: ImageKey) -> None:
        """Record that the embedding is on the device, and release the slot with the pixels."""
        under_way = self._under_way.pop(key)
        assert under_way.stage == "encoding"
        if self._tiles is not None:
            self._tiles.ended(under_way.image, whole=True)
        self._release_slot(under_way)
        self._fresh[key] = fresh = Fresh()  # `ahead` takes over the hold of the encoding
        if self._embeddings.disk is not None:
            self._embeddings.hold(key)
            fresh.unsaved = True
        self.settle(key)

    def encode_failed(self, key: ImageKey) -> list[Sequence]:
        """Drop an image that the workers could not encode. Return the sequences that need it."""
        under_way = self._under_way.pop(key)
        assert under_way.stage == "encoding"
        if self._tiles is not None:
            self._tiles.ended(under_way.image, whole=False)
        self.slots.free(under_way.slot)
        self._embeddings.release(key)
        self._embeddings.not_encoded(key)
        return self._needed_by(key)

    def read_ended(self, key: ImageKey, whole: bool) -> None:
        """Record the end of a read from disk.

        whole: False if the read failed. Then the image is absent again.
        """
        self._embeddings.fetched(key, whole)
        self.settle(key)

    # ---- aliases

    def _lives(self, key: ImageKey) -> bool:
        """Return True if the embedding is cached, or will be without another request to the
        front end.
        """
        under_way = self._under_way.get(key)
        if under_way is not None:
            return under_way.stage != "asked"
        return self._embeddings.locate(key) is not None

    def _reclaim(self, sequence: Sequence) -> None:
        if sequence.shown.shared:
            for key in self.aliases.reclaim(sequence):
                self.settle(key)

    # ---- planning

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Add pending moves to the plan, and save embeddings that were just encoded.

        Call `end_plan` afterwards.
        """
        builder.moves += self._moves
        self._moves = []
        unsaved = self._unsaved()
        for key in unsaved:
            builder.save_embedding(key, *self._embeddings.save(key))
        for key in unsaved:
            if key not in builder.save:  # not worth saving, so release its hold on device memory
                self._end_unsaved(key)

    def end_plan(self) -> None:
        """Release the holds on embeddings that this plan saves."""
        for key in self._unsaved():
            self._end_unsaved(key)

    def show(
        self,
        run: Run,
        image: Image,
        builder: PlanBuilder,
        chunk: Collection[ImageKey],
        may_exceed: bool,
        *,
        idle: bool = False,
    ) -> Place | None:
        """Put an image's embedding on the device in this step, and pin it for a running sequence.

        Returns where the embedding was before, or None if it is not available or does not fit.

        chunk: the images of the current chunk, which are evicted after all others.
        may_exceed: True if the device's budget may be exceeded.
        idle: as `Sequence.idle`.
        """
        key, embeddings = image.key, self._embeddings
        if not self.showable(key):
            return None
        place = embeddings.locate(key)
        if place != "device" and not embeddings.fits(image.num_tokens):
            if may_exceed:
                self._release_prefetched(chunk)
            fits = embeddings.fits(image.num_tokens)
            if not (fits or may_exceed):
                return None
            builder.exceeded |= not fits
        if place != "device":
            builder.moves += embeddings.to_device(key, chunk)
        if key not in run.pins:
            embeddings.pin(key, idle=idle)
            run.pins.add(key)
        self._end_ahead(key)
        return place

    def provide(
        self, order: Iterable[Sequence], match: Callable[[Sequence], int], builder: PlanBuilder
    ) -> None:
        """Request images, and start to read and encode them, the most urgent first.

        order: the sequences, the most urgent first.
        match: looks up a waiting sequence in the prefix cache.
        """
        walk = ImageScan(builder, match)
        for sequence in self._scan_upcoming(order, walk):
            self._reclaim(sequence)
            for start, image in sequence.upcoming(sequence.images_end):
                known = image.key in walk.seen or self.showable(image.key)
                walk.seen.add(image.key)
                if known:
                    continue
                self._load_image(image, walk)
                if self._begin(sequence, start, image, walk):
                    walk.first = False
        self._asking, self._unconstrained = walk.asking, walk.asking and walk.encoding
        if walk.starved is not None:
            self._reserve_slot(walk.starved)

    def _scan_upcoming(self, order: Iterable[Sequence], walk: ImageScan) -> Iterator[Sequence]:
        """Yield sequences, the most urgent first, while the plan can do more for their images.

        This looks up waiting sequences in the prefix cache, and limits their number to bound the
        cost of a plan.
        """
        looks = max(self._limits.look_ahead, self._limits.max_running)
        for sequence in order if self._users else ():
            if sequence.run is None and sequence.images_end:
                looks -= 1
                if sequence.matched is None:
                    walk.match(sequence)
            arrived = any(each.stage == "arrived" for each in self._under_way.values())
            if looks < 0 or not (walk.asking or (walk.encoding and arrived)):
                return
            yield sequence

    def _load_image(self, image: Image, walk: ImageScan) -> None:
        """Start to load an absent image, and change its state to asked, arrived or reading.

        If an image has to wait, later ones wait too, so that space is allocated in order.
        """
        if walk.asking and image.key not in self._under_way:
            walk.asking = self._fetch(image, walk.first, walk.builder)
            if walk.first and not walk.asking:
                walk.starved = image

    def _begin(self, sequence: Sequence, start: int, image: Image, walk: ImageScan) -> bool:
        """Start to encode an arrived image if `sequence`, which needs it at token `start`, needs it
        soon.

        Returns False if `sequence` does not need the image any more, because another sequence has
        computed these tokens.
        """
        here = self._under_way.get(image.key)
        horizon = sequence.position + self._prefetch_tokens
        near = here is not None and here.stage == "arrived" and start < horizon
        if here is None or not (walk.encoding and near):
            return True
        if self._tiles is not None and not self._find_tiles(self._tiles, here, walk.builder):
            return True
        before = sequence.matched
        if sequence.run is None:
            walk.match(sequence)
        walk.builder.again |= sequence.matched != before
        if sequence.position >= sequence.last_use[image.key]:
            return False
        walk.encoding = self._within_step(here, walk.builder) and self._find_room(
            sequence, start, image, walk
        )
        if walk.encoding:
            self._encode(sequence, here, walk)
        return True

    def _find_tiles(self, tiles: TileIndex, here: InFlightImage, builder: PlanBuilder) -> bool:
        """Look for cached tiles of an arrived image, before its encoding starts.

        Returns False if the image must wait, because another image with some of its tiles is being
        encoded.
        """
        coming = {move.key for move in builder.moves if move.source == "staged"}
        found = None if here.given else tiles.find(here.image, {*self._under_way, *coming})
        if found is not None:
            here.copies, here.patches = found.copies, max(1, found.patches)
            here.awaits = found.awaits
        return here.awaits is None

    def tower(self, decodes: bool, beside: bool) -> int:
        """Return the budget of the vision encoder in the step (`Plan.tower`).

        0 means that there is no limit, or that no image is being encoded. An image that only
        background requests need is encoded in parts.

        decodes: True if the step has decoding rows.
        beside: True if the step has other work. Then background images pause, unless their space is
            needed.
        """
        patches = self._patches_encoding(awaited=True)
        if not patches and (idle := self._patches_encoding()):
            if beside and self._unconstrained:
                return TOWER_RESTS
            part = -(-max(idle) * self._limits.tower_blocks // TOWER_STEPS)
            return min(part, self._limits.tower_budget or part)
        budget = (self.pace or self._limits).tower_budget if patches else 0
        if budget and not (decodes or self._limits.tower_shares):
            return sum(patches) * self._limits.tower_blocks
        if not (decodes and budget):
            return budget
        return min(budget, -(-max(patches) * self._limits.tower_blocks // TOWER_STEPS))

    def step_ended(self, plan: Plan, planned: float) -> None:
        """Record that the oldest plan in flight has been executed.

        planned: the time at which the plan was made, on the monotonic clock.
        """
        assert self.pace is not None, "a tower keeps its pace on a GPU alone"
        self.pace.ended(plan, planned, bool(self._patches_encoding()))

    # ---- pixels

    def _release_slot(self, under_way: InFlightImage) -> None:
        """Release the slot. Its pixels stay cached, but a received embedding is discarded."""
        if under_way.given:
            self.slots.free(under_way.slot)
        else:
            self.slots.keep_pixels(under_way.image.key, under_way.slot)

    def _fetch(self, image: Image, first: bool, builder: PlanBuilder) -> bool:
        """Start to load an absent image from disk, from cached pixels or from the front end.

        Returns True if later images may be loaded as well, False if enough images are in flight or
        the arena is full.
        """
        key, embeddings = image.key, self._embeddings
        if not first and self._in_flight() >= self._limits.look_ahead:
            return False
        if key in embeddings.keys_being_read:
            return True
        if embeddings.on_disk(key):
            builder.moves.append(embeddings.fetch(key))
            return True
        if (kept := self.slots.reuse(key)) is not None:
            self._under_way[key] = InFlightImage(
                image, kept, "arrived", image.num_patches, reused=True
            )
            return True
        return self._request_pixels(image)

    def _in_flight(self) -> int:
        pixels = sum(each.stage != "encoding" for each in self._under_way.values())
        return pixels + len(self._embeddings.keys_being_read) + len(self._embeddings.staged)

    def _request_pixels(self, image: Image) -> bool:
        slot = self.slots.reserve(image)
        if slot is not None:
            # The front end can only decode images under the keys of the requests that contain them.
            for sequence in list(self._users.get(image.key, ())):
                self._reclaim(sequence)
            self._under_way[image.key] = InFlightImage(image, slot, "asked", image.num_patches)
            self._want.append((image.key, slot))
        return slot is not None

    def _reserve_slot(self, image: Image) -> None:
        """Free space in the arena for the image that is needed first.

        If pixels that arrived too early use all slots, drop them, the latest requested first. They
        will be requested again.
        """
        if any(each.stage != "arrived" for each in self._under_way.values()):
            return
        for key in list(self._under_way)[::-1]:
            self.slots.free(self._under_way.pop(key).slot)
            if self._request_pixels(image):
                return

    def _patches_encoding(self, *, awaited: bool = False) -> list[int]:
        """Return the number of patches of each image that is being encoded.

        Embeddings from another server are left out because they are loaded within their step.

        awaited: True to leave out images that only background requests need.
        """
        encoding = (each for each in self._under_way.values() if each.stage == "encoding")
        return [
            each.patches
            for each in encoding
            if not (each.given or (awaited and each.idle and not self._awaited(each.image.key)))
        ]

    def _awaited(self, key: ImageKey) -> bool:
        """Return True if a foreground request needs the image, or needs another image that waits
        for this image's tiles.
        """
        keys = [key, *(other for other, each in self._under_way.items() if each.awaits == key)]
        return any(not sequence.idle for each in keys for sequence in self._needed_by(each))

    def _needed_by(self, key: ImageKey) -> list[Sequence]:
        return [sequence for sequence in self._users.get(key, ()) if sequence.needs(key)]

    # ---- embeddings

    def _within_step(self, here: InFlightImage, builder: PlanBuilder) -> bool:
        """Return True if the image may be encoded from this step on.

        An embedding from another server may always be used. Otherwise the number of patches being
        encoded is limited, except that a single image of any size may be encoded. No other image
        may be encoded while another request waits for an encoding that a background request
        started: the workers run that encoding with low priority until it is finished.
        """
        encoding = (each for each in self._under_way.values() if each.stage == "encoding")
        if any(each.idle and self._awaited(each.image.key) for each in encoding):
            return here.given
        spent = sum(self._patches_encoding()) if self._limits.tower_budget else builder.patches
        most = self._limits.encode_patches
        return here.given or not spent or spent + here.patches <= most

    def _find_room(self, sequence: Sequence, start: int, image: Image, walk: ImageScan) -> bool:
        """Return True if the embedding fits on the device.

        Once per plan, the first missing image of a running sequence that would otherwise be stuck
        may exceed the device's budget. If there is no space, `sequence.cramped` becomes True.
        """
        fits, builder = self._embeddings.fits, walk.builder
        if fits(image.num_tokens):
            return True
        held = self._count_ahead()
        if walk.first:
            self._prefetch(sequence, start, image, builder)
            if fits(image.num_tokens):
                return True
            run = sequence.run
            stuck = run is not None and start <= run.planned == run.computed
            if stuck and not builder.exceeded:
                builder.exceeded = True
                return True
        # Another pass may find an image that fits in the released space.
        builder.again |= not sequence.cramped or self._count_ahead() < held
        sequence.cramped = True
        return False

    def _prefetch(self, sequence: Sequence, start: int, image: Image, builder: PlanBuilder) -> None:
        """Free space for the first missing image, by releasing embeddings that were encoded in
        advance.

        The embeddings of the next images of `sequence` are released only if no work in progress
        could free enough space.
        """
        horizon = sequence.position + self._prefetch_tokens
        self._release_prefetched({each.key for _, each in sequence.upcoming(horizon)})
        idle = sequence.run is None and not (builder.works or self._patches_encoding())
        if idle and not self._embeddings.fits(image.num_tokens):
            # They were encoded while more of the sequence's prefix was cached. Nothing is in
            # progress, so no other event would free this memory.
            self._release_prefetched({each.key for _, each in sequence.upcoming(start)})

    def _encode(self, sequence: Sequence, here: InFlightImage, walk: ImageScan) -> None:
        """Start to encode an arrived image. From now on, its embedding is held on the device.

        To free space, images in `walk.seen` are evicted after all others.
        """
        image, embeddings, builder = here.image, self._embeddings, walk.builder
        here.stage = "encoding"
        adapter = sequence.request.adapter
        # Not from the image's key: the adapter may have been loaded again, with another index,
        # since the key was computed.
        here.adapter = adapter.number if adapter.tower else 0
        here.idle = sequence.idle and not self._awaited(image.key)
        source: Source = "encoder" if here.given else "pixels" if here.reused else "none"
        missed = embeddings.why_missing(image.key)
        new = () if self._tiles is None else self._tiles.begin(image, here.copies)
        sequence.encoded.setdefault(image.key, EncodedImage(missed, source, new))
        embeddings.count_lookup(None)
        builder.moves += embeddings.admit(image.key, image.num_tokens, walk.seen, idle=here.idle)
        embeddings.hold(image.key)
        given = image.num_tokens if here.given else 0
        builder.encode.append(
            Encode(
                image.key,
                image.grid,
                here.patches,
                here.slot,
                given,
                here.adapter,
                here.idle,
                here.copies,
            )
        )
        if here.given:
            self._counts.images_given += 1
            return
        builder.patches += here.patches
        self._counts.images_encoded += 1
        self._counts.patches_encoded += here.patches
        self._counts.tiles_new += sum(new)
        self._counts.tiles_seen += len(here.copies)
        self._counts.images_pixels += here.reused

    # ---- just encoded embeddings

    def _unsaved(self) -> list[ImageKey]:
        return [key for key, fresh in self._fresh.items() if fresh.unsaved]

    def _count_ahead(self) -> int:
        return sum(fresh.ahead for fresh in self._fresh.values())

    def _end_unsaved(self, key: ImageKey) -> None:
        """End the state `unsaved` of an embedding, which the current plan saves or which is not
        worth saving.
        """
        fresh = self._fresh[key]
        fresh.unsaved = False
        self._release(key, fresh)

    def _end_ahead(self, key: ImageKey) -> None:
        """End the state `ahead` (encoded but not used yet) of an embedding.

        A plan uses the embedding, no sequence needs it any more, or its space is needed sooner.
        """
        fresh = self._fresh.get(key)
        if fresh is not None and fresh.ahead:
            fresh.ahead = False
            self._release(key, fresh)

    def _release(self, key: ImageKey, fresh: Fresh) -> None:
        """End one of the two holds on an embedding, after its state `ahead` or `unsaved` has
        ended.
        """
        self._embeddings.release(key)
        if not (fresh.ahead or fresh.unsaved):
            del self._fresh[key]

    def _release_prefetched(self, but: Collection[ImageKey]) -> None:
        for key in [key for key in self._fresh if key not in but]:
            self._end_ahead(key)

    # ---- for tests

    def audit(self) -> None:
        """Assert that the slots in use are exactly those of images in flight.

        Also asserts that a sequence still needs each image whose pixels have arrived, or that is
        encoded but not yet used.
        """
        slots = sorted((each.slot.offset, each.slot.nbytes) for each in self._under_way.values())
        assert self.slots.bytes_in_use == sum(nbytes for _, nbytes in slots)
        assert all(at + nbytes <= after for (at, nbytes), (after, _) in pairwise(slots))
        arrived = {key for key, each in self._under_way.items() if each.stage == "arrived"}
        ahead = {key for key, fresh in self._fresh.items() if fresh.ahead}
        assert all(self._needed_by(key) for key in arrived | ahead)
        assert all(fresh.ahead or fresh.unsaved for fresh in self._fresh.values())
        assert not any(self._embeddings.ready(key) for key in arrived)
