"""Every image needed by some request, from absent to shown: one state machine each.

    absent ──ask──▶ asked ──pixels──▶ arrived ──begin──▶ encoding ──encoded──▶ ahead, unsaved
       ▲              │ failed, unwanted   │ room is needed first                   │ shown, saved
       └──────────────┴────────────────────┘◀──────── evicted ────────────────────┐ ▼
                                                                                  device ◀─▶ host
                        disk ──read──▶ reading ──▶ staged ──shown──▶ device         └──────▶ disk

ahead: encoded, but still to be shown by a plan. unsaved: encoded, but still to be written to disk
by a plan. Both begin when an encoding ends and end by themselves, each in its own time. Until then
the embedding is held on the device, and may be shown.

Owns asked, arrived, encoding, ahead and unsaved, and the arena's slots (`slots.py`).
`cache/embeddings.py` owns the tiers and reads from disk.

Everything is granted in order of need: running sequences, then waiting ones in turn order. This
order rules out deadlock, because its first image may take anything lacking. It takes slots from
pixels that arrived too early, and space of prefetched embeddings. The device's budget may be
exceeded for a running sequence that would otherwise be stuck. A slot being written, or read by the
vision tower, stays taken until the front, or the workers, have reported the end.
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

if TYPE_CHECKING:  # for what few servers have
    from saccade.sched.images.tiles import TileIndex
    from saccade.sched.step_pace import StepPace

PREFETCH_CHUNKS = 2
"""Images of so many chunks from a sequence's position on may be encoded."""

TOWER_STEPS = 8
"""While a row decodes, a step does at most one part in so many of an image's encoding."""


class ImageScheduler:
    """Single flight: an image is asked for, read and encoded once at a time, for any number of
    sequences.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        embeddings: EmbeddingCache,
        counts: Counts,
        pace: StepPace | None = None,
        tiles: TileIndex | None = None,
    ) -> None:
        """Start without images.

        pace: None where the tower's budget is a constant. tiles: None for a tower without.
        """
        self.slots = PixelSlots(limits.arena_bytes, limits.given_bytes)
        self._limits = limits
        self._embeddings = embeddings
        self._counts = counts
        self.pace = pace
        self._tiles = tiles
        self._users: dict[ImageKey, list[Sequence]] = {}
        self.aliases = ImageAliases(self._lives, self._users)
        self._under_way: dict[ImageKey, InFlightImage] = {}
        self._fresh: dict[ImageKey, Fresh] = {}
        self._asking = True  # the last plan requested everything that is needed now
        self._roomy = True  # nor was any request deferred for lack of space or time
        self._moves: list[Move] = list(embeddings.beyond_budget)
        self._want: list[tuple[ImageKey, PixelSlot]] = []
        self._unwanted: dict[ImageKey, None] = {}  # until the front answers

    # ---- what an image is to others

    @property
    def busy(self) -> bool:
        """Return True if the workers have work to finish or memory to release.

        Whatever a sequence shows is left out.
        """
        work = self._unsaved() or self._moves or self._embeddings.staged
        return bool(work) or self.waits_for_workers

    @property
    def waits_for_workers(self) -> bool:
        """Return True if an encoding or a read from disk will end by itself."""
        return bool(self._patches_encoding() or self._embeddings.keys_being_read)

    def encodes_with(self, adapter: int) -> bool:
        """Return True if an image is being encoded with the adapter of the given number."""
        under_way = self._under_way.values()
        return any(each.stage == "encoding" and each.adapter == adapter for each in under_way)

    def showable(self, key: ImageKey) -> bool:
        """Return True if a plan made now may show the image, given room on the device."""
        return key not in self._under_way and self._embeddings.ready(key)

    def missing(self, sequence: Sequence) -> ImageKey | None:
        """Return the first missing image that the sequence has yet to show, if any."""
        upcoming = sequence.upcoming(sequence.images_end)
        return next((image.key for _, image in upcoming if not self.showable(image.key)), None)

    def lacks(self, sequence: Sequence) -> bool:
        """Return True if the sequence has yet to show a missing image."""
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
        """Ask for a new sequence's images before the next plan, unless an earlier sequence lacks
        room.
        """
        self._reclaim(sequence)
        for _, image in sequence.upcoming(sequence.images_end) if self._asking else ():
            key = image.key
            there = key in self._under_way or key in self.slots or self._embeddings.locate(key)
            if not there and not (self._in_flight() < self._limits.look_ahead and self._ask(image)):
                return

    def leave(self, sequence: Sequence) -> None:
        """Release the images of an ended sequence."""
        for key in sequence.last_use:
            self._users[key].remove(sequence)
            if not self._users[key]:
                del self._users[key]
            self.settle(key)

    def settle(self, key: ImageKey) -> None:
        """Release the image's slot, encoding or embedding if every sequence is done with it.

        A slot being written, an encoding and a read from disk end by themselves first.
        """
        if self._needed_by(key):
            return
        under_way = self._under_way.get(key)
        if under_way is not None and under_way.stage == "asked" and not under_way.unwanted:
            under_way.unwanted = True
            self._unwanted[key] = None
        elif under_way is not None and under_way.stage == "arrived":
            del self._under_way[key]
            self._put_away(under_way)
        self._end_ahead(key)
        if key in self._embeddings.staged:
            self._moves.append(self._embeddings.unstage(key))

    def flush(self, disk: bool = True) -> None:
        """Release embeddings and pixels cached only for later use.

        The disk is cleared only with `disk`. The next plan notifies the workers.
        """
        self._moves += self._embeddings.flush(disk)
        self.slots.drop_kept()
        if self._tiles is not None:
            self._tiles.forget()

    def drop_embeddings(self, nbytes: int) -> int:
        """Release about `nbytes` of embeddings that are cached only for later use.

        The next plan notifies the workers. Returns the bytes.
        """
        moves = self._embeddings.shrink(nbytes)
        self._moves += moves
        return sum(move.num_tokens for move in moves) * self._embeddings.bytes_per_token

    def take_notices(self) -> Notices:
        """Return the news for the front, and clear it."""
        aliases = self.aliases.take_found() if self.aliases.found else ()
        notices = Notices(tuple(self._want), tuple(self._unwanted), aliases)
        self._want, self._unwanted = [], {}
        return notices

    # ---- the front and the workers have done something

    def pixels_ready(
        self,
        key: ImageKey,
        given: bool = False,
        pixels: bytes = b"",
        tiles: tuple[bytes, ...] = (),
    ) -> None:
        """Take what the front has written to the image's slot, now that it is done.

        given: the slot holds an embedding made by another server, instead of pixels. pixels: their
        name, or empty if they were left unnamed. tiles: the names of its tiles, if any.
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
        """Free the slot that the front failed to fill. Returns the sequences that are stuck.

        An unwanted image, needed again by now, is asked for again.
        """
        under_way = self._under_way.pop(key)
        assert under_way.stage == "asked", "pixels that were not asked for"
        self.slots.free(under_way.slot)
        self._unwanted.pop(key, None)
        return [] if under_way.unwanted else self._needed_by(key)

    def encoded(self, key: ImageKey) -> None:
        """Record that the embedding is on the device, and the pixels have been read."""
        under_way = self._under_way.pop(key)
        assert under_way.stage == "encoding"
        if self._tiles is not None:
            self._tiles.ended(under_way.image, whole=True)
        self._put_away(under_way)
        self._fresh[key] = fresh = Fresh()  # `ahead` takes over what held it while it was encoded
        if self._embeddings.disk is not None:
            self._embeddings.hold(key)
            fresh.unsaved = True
        self.settle(key)

    def encode_failed(self, key: ImageKey) -> list[Sequence]:
        """Drop an image that the workers failed to encode. Returns the sequences that are stuck."""
        under_way = self._under_way.pop(key)
        assert under_way.stage == "encoding"
        if self._tiles is not None:
            self._tiles.ended(under_way.image, whole=False)
        self.slots.free(under_way.slot)
        self._embeddings.release(key)
        self._embeddings.not_encoded(key)
        return self._needed_by(key)

    def read_ended(self, key: ImageKey, whole: bool) -> None:
        """Record that a read from disk has ended. After a failed read the image is absent again."""
        self._embeddings.fetched(key, whole)
        self.settle(key)

    # ---- images whose pixels are another's

    def _lives(self, key: ImageKey) -> bool:
        """Return True if the embedding is cached, or available without the front."""
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
        """Save encoded embeddings. `end_plan` follows."""
        builder.moves += self._moves
        self._moves = []
        unsaved = self._unsaved()
        for key in unsaved:
            builder.save_embedding(key, *self._embeddings.save(key))
        for key in unsaved:
            if key not in builder.save:  # or it would occupy device memory unused
                self._end_unsaved(key)

    def end_plan(self) -> None:
        """Let embeddings saved by this plan leave the device from the next plan on."""
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
        """Put an image on the device in this step, pinned for a running sequence.

        Returns the image's slot, or None if the image was evicted or the device has no space.

        `chunk`: images in the same chunk, which leave the device last. idle: as `Sequence.idle`.
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
        """Ask for images, begin to read them from disk and begin to encode them, in order of need.

        `match`: looks up a waiting sequence in the prefix cache.
        """
        walk = ImageScan(builder, match)
        for sequence in self._scan_upcoming(order, walk):
            self._reclaim(sequence)
            for start, image in sequence.upcoming(sequence.images_end):
                known = image.key in walk.seen or self.showable(image.key)
                walk.seen.add(image.key)
                if known:
                    continue
                self._bring(image, walk)
                if self._begin(sequence, start, image, walk):
                    walk.first = False
        self._asking, self._roomy = walk.asking, walk.asking and walk.encoding
        if walk.starved is not None:
            self._reserve_slot(walk.starved)

    def _scan_upcoming(self, order: Iterable[Sequence], walk: ImageScan) -> Iterator[Sequence]:
        """Yield sequences in order of need, as long as the plan can do anything for them.

        Each is looked up in the prefix cache. The number of waiting sequences with images is
        bounded, and so is a plan's cost.
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

    def _bring(self, image: Image, walk: ImageScan) -> None:
        """Move an image from absent to asked, arrived or reading.

        Once an image had to wait, later ones wait too, so that space is given in order.
        """
        if walk.asking and image.key not in self._under_way:
            walk.asking = self._fetch(image, walk.first, walk.builder)
            if walk.first and not walk.asking:
                walk.starved = image

    def _begin(self, sequence: Sequence, start: int, image: Image, walk: ImageScan) -> bool:
        """Move a near image from arrived to encoding. `sequence` shows it from `start`.

        Returns False if another sequence has computed those tokens, so that `sequence` can do
        without the image.
        """
        here = self._under_way.get(image.key)
        horizon = sequence.position + PREFETCH_CHUNKS * self._limits.longest_chunk
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
        """Look for the rows of an arrived image's tiles, before its encoding begins.

        Returns False if some are being made for another image, which this one then waits for.
        """
        coming = {move.key for move in builder.moves if move.source == "staged"}
        found = None if here.given else tiles.find(here.image, {*self._under_way, *coming})
        if found is not None:
            here.copies, here.patches = found.copies, max(1, found.patches)
            here.awaits = found.awaits
        return here.awaits is None

    def tower(self, decodes: bool, beside: bool) -> int:
        """Compute `Plan.tower`, which is 0 also without an encoding.

        An unawaited image is encoded in parts. It rests `beside` awaited work, unless its room is
        wanted.
        """
        patches = self._patches_encoding(awaited=True)
        if not patches and (idle := self._patches_encoding()):
            if beside and self._roomy:
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
        """Record that the oldest plan in flight, handed out at `planned`, has been executed."""
        assert self.pace is not None, "a tower keeps its pace on a GPU alone"
        self.pace.ended(plan, planned, bool(self._patches_encoding()))

    # ---- pixels

    def _put_away(self, under_way: InFlightImage) -> None:
        """Give up the slot. The pixels may serve another time."""
        if under_way.given:
            self.slots.free(under_way.slot)
        else:
            self.slots.keep_pixels(under_way.image.key, under_way.slot)

    def _fetch(self, image: Image, first: bool, builder: PlanBuilder) -> bool:
        """Have an absent image brought. Returns True if the next may be looked at.

        Returns False with enough on their way, or without room in the arena.
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
        return self._ask(image)

    def _in_flight(self) -> int:
        """Count the images asked for, arrived, being read from disk, or staged."""
        pixels = sum(each.stage != "encoding" for each in self._under_way.values())
        return pixels + len(self._embeddings.keys_being_read) + len(self._embeddings.staged)

    def _ask(self, image: Image) -> bool:
        slot = self.slots.reserve(image)
        if slot is not None:
            # The front knows each image by the names of those who asked it.
            for sequence in list(self._users.get(image.key, ())):
                self._reclaim(sequence)
            self._under_way[image.key] = InFlightImage(image, slot, "asked", image.num_patches)
            self._want.append((image.key, slot))
        return slot is not None

    def _reserve_slot(self, image: Image) -> None:
        """Make room in the arena for the image needed first.

        If every slot would stay taken, pixels that arrived too early are dropped, the latest
        requested first. They will be requested again.
        """
        if any(each.stage != "arrived" for each in self._under_way.values()):
            return
        for key in list(self._under_way)[::-1]:
            self.slots.free(self._under_way.pop(key).slot)
            if self._ask(image):
                return

    def _patches_encoding(self, *, awaited: bool = False) -> list[int]:
        """Return the patches in every unfinished encoding. awaited: only in awaited ones.

        An embedding from another server ends with its step.
        """
        encoding = (each for each in self._under_way.values() if each.stage == "encoding")
        return [
            each.patches
            for each in encoding
            if not (each.given or (awaited and each.idle and not self._awaited(each.image.key)))
        ]

    def _awaited(self, key: ImageKey) -> bool:
        """Return True if an awaited sequence needs the image, or another with tiles of it."""
        keys = [key, *(other for other, each in self._under_way.items() if each.awaits == key)]
        return any(not sequence.idle for each in keys for sequence in self._needed_by(each))

    def _needed_by(self, key: ImageKey) -> list[Sequence]:
        return [sequence for sequence in self._users.get(key, ()) if sequence.needs(key)]

    # ---- embeddings

    def _within_step(self, here: InFlightImage, builder: PlanBuilder) -> bool:
        """Return True if the step has patches left for the image.

        A single image always fits, and more images fit up to the limit. An embedding from another
        server is free. An encoding started while unawaited, and awaited by now, comes first, though
        the workers still take it for unawaited.
        """
        encoding = (each for each in self._under_way.values() if each.stage == "encoding")
        if any(each.idle and self._awaited(each.image.key) for each in encoding):
            return here.given
        spent = sum(self._patches_encoding()) if self._limits.tower_budget else builder.patches
        most = self._limits.encode_patches
        return here.given or not spent or spent + here.patches <= most

    def _find_room(self, sequence: Sequence, start: int, image: Image, walk: ImageScan) -> bool:
        """Return True if the device has room for the embedding.

        The device exceeds its budget for a running sequence that would otherwise be stuck: for
        one image per plan, the first missing one. A sequence without room is `cramped`.
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
        # The released space may be enough for another image.
        builder.again |= not sequence.cramped or self._count_ahead() < held
        sequence.cramped = True
        return False

    def _prefetch(self, sequence: Sequence, start: int, image: Image, builder: PlanBuilder) -> None:
        """Give the room of embeddings encoded ahead to the first missing image.

        Its own sequence's next images keep theirs, if anything in progress could still make room.
        """
        horizon = sequence.position + PREFETCH_CHUNKS * self._limits.longest_chunk
        self._release_prefetched({each.key for _, each in sequence.upcoming(horizon)})
        idle = sequence.run is None and not (builder.works or self._patches_encoding())
        if idle and not self._embeddings.fits(image.num_tokens):
            # Encoded when more of its prefix was cached: no other event frees this memory.
            self._release_prefetched({each.key for _, each in sequence.upcoming(start)})

    def _encode(self, sequence: Sequence, here: InFlightImage, walk: ImageScan) -> None:
        """Encode an arrived image whose embedding has room, and hold the embedding from now on.

        `seen` images leave the device last.
        """
        image, embeddings, builder = here.image, self._embeddings, walk.builder
        here.stage = "encoding"
        adapter = sequence.request.adapter
        # The sequence's own: the same adapter may have been loaded again since the image was named.
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

    # ---- embeddings that were just encoded

    def _unsaved(self) -> list[ImageKey]:
        return [key for key, fresh in self._fresh.items() if fresh.unsaved]

    def _count_ahead(self) -> int:
        return sum(fresh.ahead for fresh in self._fresh.values())

    def _end_unsaved(self, key: ImageKey) -> None:
        """End the unsaved state: a plan saves the embedding, or it stays unsaved for good."""
        fresh = self._fresh[key]
        fresh.unsaved = False
        self._release(key, fresh)

    def _end_ahead(self, key: ImageKey) -> None:
        """End the ahead state.

        A plan shows the embedding, or every sequence is done with it, or its room is needed sooner.
        """
        fresh = self._fresh.get(key)
        if fresh is not None and fresh.ahead:
            fresh.ahead = False
            self._release(key, fresh)

    def _release(self, key: ImageKey, fresh: Fresh) -> None:
        """Release one hold on an embedding, as one of its two states has ended."""
        self._embeddings.release(key)
        if not (fresh.ahead or fresh.unsaved):
            del self._fresh[key]

    def _release_prefetched(self, but: Collection[ImageKey]) -> None:
        """Let embeddings encoded ahead leave the device, except those in `but`."""
        for key in [key for key in self._fresh if key not in but]:
            self._end_ahead(key)

    # ---- for tests

    def audit(self) -> None:
        """Assert that slots in use belong to images in progress.

        Also asserts that arrived pixels and embeddings held ahead are needed.
        """
        slots = sorted((each.slot.offset, each.slot.nbytes) for each in self._under_way.values())
        assert self.slots.bytes_in_use == sum(nbytes for _, nbytes in slots)
        assert all(at + nbytes <= after for (at, nbytes), (after, _) in pairwise(slots))
        arrived = {key for key, each in self._under_way.items() if each.stage == "arrived"}
        ahead = {key for key, fresh in self._fresh.items() if fresh.ahead}
        assert all(self._needed_by(key) for key in arrived | ahead)
        assert all(fresh.ahead or fresh.unsaved for fresh in self._fresh.values())
        assert not any(self._embeddings.ready(key) for key in arrived)
