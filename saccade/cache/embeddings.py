"""The index of the embedding cache. It records which tier stores each image's embedding, how often
each image is used, and how it was encoded, and selects the embeddings to evict.

The workers have the tensors, and execute the `Move`s that this module returns. Embeddings pinned by
clients (`pins.py`) are evicted last.

    encode ──▶ device ◀──────▶ host         an embedding is on the device or on the host, not both
                  │ ▲
             save │ └── staged ◀── disk      a saved embedding stays on disk when it is also
                  └───────────────▲         loaded; disk reads run in the background
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.cache.cache_tier import CacheTier
from saccade.cache.pins import PinnedItems, PinTable
from saccade.core.config import EmbeddingBudgets, embedding_file_bytes
from saccade.core.plan import Move, Place
from saccade.core.types import Image, ImageKey, Missed, Tier

if TYPE_CHECKING:
    from saccade.cache.listeners import EmbeddingListener


MAX_USES_COUNTED = 8.0
USES_PER_CACHED_IMAGE = 10
"""All counts are halved after this many uses per cached image."""
MIN_CACHED_IMAGES = 100
"""Minimum number of cached images that is assumed when counts are halved."""
KEYS_PER_DIGEST = 8  # preprocessing settings remembered for each image


class Popularity:
    """Counts how often each image is used. The counts decay."""

    def __init__(self) -> None:
        self._counts: dict[ImageKey, float] = {}
        self._since = 0

    def __len__(self) -> int:
        return len(self._counts)

    def use(self, key: ImageKey, cached: int) -> None:
        """Count a sequence that contains the image `key`.

        After `USES_PER_CACHED_IMAGE` new keys per cached image, all counts are halved. This bounds
        the size of the table.

        cached: the number of images cached now.
        """
        self._counts[key] = self._counts.get(key, 0.0) + 1.0
        self._since += 1
        if self._since >= USES_PER_CACHED_IMAGE * max(MIN_CACHED_IMAGES, cached):
            self._since = 0
            self._counts = {key: uses / 2 for key, uses in self._counts.items() if uses >= 1.0}

    def of(self, key: ImageKey) -> float:
        """Return the count of `key`, limited to the range from 1 to `MAX_USES_COUNTED`."""
        return min(MAX_USES_COUNTED, max(1.0, self._counts.get(key, 0.0)))


class GhostList:
    """Remembers the last `size` encoded images and their latest preprocessing settings, to explain
    cache misses.

    Entries include the salt, so that a tenant cannot learn which images others have used.
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._settings: OrderedDict[tuple[bytes, str], tuple[bytes, ...]] = OrderedDict()

    def add(self, key: ImageKey) -> None:
        """Record that the encoding of `key` starts."""
        image = key.digest, key.salt
        others = tuple(each for each in self._settings.pop(image, ()) if each != key.settings)
        self._settings[image] = (*others[1 - KEYS_PER_DIGEST :], key.settings)
        if len(self._settings) > self._size:
            self._settings.popitem(last=False)

    def why_missing(self, key: ImageKey) -> Missed:
        """Return the reason for a cache miss on `key`."""
        settings = self._settings.get((key.digest, key.salt))
        if settings is None:
            return "never seen"
        return "evicted" if key.settings in settings else "other settings"


QUADRATIC_TOKENS = 2048
"""Tokens of an image for which attention costs the vision encoder as much as all other layers
together (about 6 x width patches of Qwen3-VL).
"""
FIXED_TOKENS = 32
"""Encoding cost of an image regardless of its size, in tokens."""


def encode_cost(num_tokens: int) -> float:
    """Return the estimated cost of encoding an image, relative to a small image's cost per token.

    The estimate includes linear layers, full attention, and a fixed part.
    """
    return FIXED_TOKENS + num_tokens * (1 + num_tokens / QUADRATIC_TOKENS)


@dataclass(slots=True)
class _Record:
    num_tokens: int
    idle: bool = False  # only background requests have used it, so it is evicted first


class EmbeddingCache:
    """Tracks embeddings by image key, in up to three tiers, and selects those to move or evict.

    A held embedding stays on the device, even beyond the budget.
    """

    def __init__(
        self,
        budgets: EmbeddingBudgets,
        bytes_per_token: int,
        on_disk: Iterable[tuple[ImageKey, int]] = (),
        pins: PinTable[ImageKey] | None = None,
        file_bytes: Callable[[int], int] = embedding_file_bytes,
    ) -> None:
        """Create the cache, with the embeddings that are already on disk.

        on_disk: (key, number of tokens) of each saved embedding, the least recently used first.
        pins: an empty table whose share is in bytes, or None to disable pins.
        file_bytes: returns the size on disk of an embedding, given its size in memory, in bytes.
        """
        self._file_bytes = file_bytes
        self.bytes_per_token = bytes_per_token
        self.pins = PinTable() if pins is None else pins
        self._pinned = PinnedItems(self.pins)
        self.device = self._pinned.tier(budgets.device_bytes)
        self.tiers: dict[Tier, CacheTier[ImageKey]] = {"device": self.device}
        """The tiers that have a budget, the fastest first."""
        if budgets.host_bytes:
            self.tiers["host"] = self._pinned.tier(budgets.host_bytes)
        if budgets.disk_bytes or budgets.folder is not None:
            self.tiers["disk"] = self._pinned.tier(budgets.disk_bytes, shared=budgets.shared)
        self.host, self.disk = self.tiers.get("host"), self.tiers.get("disk")
        self.hits: Counter[Tier] = Counter()
        self.misses: Counter[Tier] = Counter()
        self._seen = GhostList()
        self._popularity = Popularity()
        self._known: dict[ImageKey, _Record] = {}
        self._listener: EmbeddingListener | None = None
        self._staged: set[ImageKey] = set()
        self.beyond_budget = self._begin(self.disk, on_disk) if self.disk is not None else []
        """Moves that delete files of an earlier run, because they exceed the disk tier's budget."""

    def _begin(
        self, disk: CacheTier[ImageKey], found: Iterable[tuple[ImageKey, int]]
    ) -> list[Move]:
        for key, num_tokens in found:
            self._seen.add(key)
            self._known[key] = _Record(num_tokens)
            disk.put(key, self._bytes_on(disk, key), self._worth(key))
        return [Move(key, "disk", None, self._drop_record(key)) for key in disk.make_room(0)]

    def listen(self, listener: EmbeddingListener) -> None:
        """Report to `listener` all cached embeddings, and from now on those that are stored or
        removed.

        An embedding counts as stored once its encoding starts, and as removed once no tier has it.
        """
        self._listener = listener
        for key, known in self._known.items():
            listener.embedding_stored(key, known.num_tokens)

    @property
    def keys_being_read(self) -> Collection[ImageKey]:
        """The embeddings that are being read from disk."""
        return self.disk.held if self.disk is not None else ()

    @property
    def staged(self) -> Collection[ImageKey]:
        """The embeddings that were read from disk but are not on the device yet."""
        return self._staged

    def locate(self, key: ImageKey) -> Place | None:
        """Return the fastest tier or staging area that has the embedding, or None if it is not
        cached.
        """
        if key in self._staged:
            return "staged"
        for tier, cache_tier in self.tiers.items():
            if key in cache_tier:
                return tier
        return None

    def num_tokens(self, key: ImageKey) -> int | None:
        """Return the number of tokens of an embedding, or None if it is not cached."""
        known = self._known.get(key)
        return None if known is None else known.num_tokens

    def ready(self, key: ImageKey) -> bool:
        """Return True if the embedding is in memory, so that the step being planned can use it."""
        return self.locate(key) not in (None, "disk")

    def on_disk(self, key: ImageKey) -> bool:
        """Return True if the embedding is only on disk, and must be read first."""
        return self.locate(key) == "disk"

    def count_lookup(self, place: Place | None) -> None:
        """Count a lookup as a hit in the tier `place`, and as a miss in each faster tier."""
        found = "disk" if place == "staged" else place
        for tier in self.tiers:
            if tier == found:
                self.hits[tier] += 1
                return
            self.misses[tier] += 1

    def why_missing(self, key: ImageKey) -> Missed:
        """Return the reason for a cache miss on `key`."""
        return self._seen.why_missing(key)

    def pin(self, key: ImageKey, *, idle: bool = False) -> None:
        """Hold `key` on the device for a running sequence that uses it, and count the use.

        Call `unpin` once for each `pin`.

        idle: True if the sequence is a background request, whose use is not counted.
        """
        if not idle:
            self._popularity.use(key, len(self._known))
            self._known[key].idle = False
        self.device.use(key, self._worth(key))
        self.device.hold(key)

    def unpin(self, key: ImageKey) -> None:
        """Undo one call of `pin`."""
        self.device.release(key)

    def hold(self, key: ImageKey) -> None:
        """Hold `key` on the device for a sequence that will use it.

        Call `release` once for each `hold`.
        """
        self.device.hold(key)

    def release(self, key: ImageKey) -> None:
        """Undo one call of `hold`."""
        self.device.release(key)

    def fits(self, num_tokens: int) -> bool:
        """Return True if `num_tokens` more tokens fit in the device's budget next to the held
        embeddings.

        If none are held, any image fits, because a single image may exceed the budget.
        """
        return (
            not self.device.held
            or self.device.held_bytes + num_tokens * self.bytes_per_token
            <= self.device.budget_bytes
        )

    def admit(
        self,
        key: ImageKey,
        num_tokens: int,
        keep: Collection[ImageKey] = (),
        *,
        idle: bool = False,
    ) -> list[Move]:
        """Add `key` to the device tier when its encoding starts. Return the moves that free space
        for it.

        keep: images to evict after all others.
        idle: True if only background requests need the image.
        """
        assert not self.ready(key), "encoded though it is there"
        self._seen.add(key)
        self._add_record(key, num_tokens, idle=idle)
        assert self._known[key].num_tokens == num_tokens
        return self._make_room_for(key, keep)

    def to_device(self, key: ImageKey, keep: Collection[ImageKey] = ()) -> list[Move]:
        """Move `key` from the host, or from staging, to the device.

        Returns the moves that the workers must execute. The last one is that of `key`.
        """
        source = self.locate(key)
        if source == "staged":
            self._staged.remove(key)
        else:
            assert source == "host" and self.host is not None
            self.host.remove(key)
        return [
            *self._make_room_for(key, keep),
            Move(key, source, "device", self._known[key].num_tokens),
        ]

    def save(self, key: ImageKey) -> tuple[list[Move], bool]:
        """Free space on disk for `key`, which was just encoded.

        Returns the moves that the workers must execute, and True if the embedding should be
        written.
        """
        disk = self.disk
        if disk is None or key in disk or self._bytes_on(disk, key) > disk.budget_bytes:
            return [], False
        if disk.shared:
            self._add_to_shared_disk(disk, key)
            return [], True
        evicted = self._put_in_tier(disk, key)
        return [
            Move(victim, "disk", None, self._drop_record(victim))
            for victim in evicted
            if victim != key
        ], key not in evicted

    def flush(self, disk: bool = True) -> list[Move]:
        """Remove every pin, and every embedding that is not held, from all tiers. Return the moves.

        disk: True to also clear the disk. Embeddings that are held on the device, being read or
            staged stay on disk.
        """
        self._pinned.clear()
        keep = {*self.device.held, *self.keys_being_read, *self._staged}
        return [
            Move(key, tier, None, self._drop_record(key))
            for tier, cache_tier in self.tiers.items()
            if disk or tier != "disk"
            for key in cache_tier.clear(keep)
        ]

    def shrink(self, nbytes: int) -> list[Move]:
        """Evict about `nbytes` of embeddings from memory, or all that are not held or pinned.

        Returns the moves that the workers must execute. Saved embeddings stay on disk.
        """
        moves: list[Move] = []
        places: Sequence[Tier] = ("host", "device")
        for place in places:
            for key in self.tiers[place].shed(nbytes) if place in self.tiers else ():
                nbytes -= self._bytes(key)
                moves.append(Move(key, place, None, self._drop_record(key)))
        return moves

    # ---- pins of clients

    @property
    def kept_bytes(self) -> int:
        """The total size of pinned embeddings, in bytes."""
        return self._pinned.nbytes

    def pin_for_client(self, key: ImageKey, client: str, seconds: int) -> None:
        """Pin `key` for a client for `seconds`, whichever tier stores it.

        Does nothing if the embedding is not cached, or exceeds what the client may pin.
        """
        if self.locate(key) is not None:
            self._pinned.pin([(key, self._bytes(key))], client, seconds)

    def hit(self, key: ImageKey, client: str) -> None:
        """Renew the pin of `client` on `key`, if there is one, after a request contained the
        image.
        """
        if self._pinned.items:
            self._pinned.hit([key], client)

    def end_pins(self) -> None:
        """Remove expired pins."""
        self._pinned.end_due()

    # ---- reading from disk, in the background

    def fetch(self, key: ImageKey) -> Move:
        """Return the move that reads `key` from disk in the background.

        Call `fetched` when the read has ended.
        """
        assert self.disk is not None and self.on_disk(key)
        self.disk.use(key, self._worth(key))
        self.disk.hold(key)
        return Move(key, "disk", "staged", self._known[key].num_tokens)

    def fetched(self, key: ImageKey, whole: bool) -> None:
        """Record the end of a read from disk.

        whole: True if it succeeded. Otherwise the embedding is removed from the disk tier, so that
            the read is not repeated.
        """
        assert self.disk is not None
        self.disk.release(key)
        if whole:
            self._staged.add(key)
        else:
            self._drop_from_disk(self.disk, key)

    def unstage(self, key: ImageKey) -> Move:
        """Drop a staged embedding that is no longer needed, and return the move."""
        self._staged.remove(key)
        return Move(key, "staged", None, self._drop_record(key))

    def not_saved(self, key: ImageKey) -> None:
        """Remove an embedding from the disk tier because it could not be written.

        If it is being read, that read fails as well, and `fetched` removes it.
        """
        if self.disk is not None and key in self.disk and key not in self.disk.held:
            self._drop_from_disk(self.disk, key)

    def not_encoded(self, key: ImageKey) -> None:
        """Remove an embedding that was admitted but could not be encoded. It must not be held."""
        self.device.remove(key)
        self._drop_record(key)

    # ---- a disk shared with other servers

    def seen_in_store(self, image: Image, there: bool) -> None:
        """Record whether a lookup found the image's embedding on a shared disk.

        The tier of a shared disk lists only the embeddings that this server has found or written.
        Removing one from the tier does not delete its file.

        there: True if it was found.
        """
        key, disk = image.key, self.disk
        if not there:
            self.not_saved(key)
        elif disk is not None and key not in disk:
            self._seen.add(key)
            self._add_record(key, image.num_tokens)
            self._add_to_shared_disk(disk, key)

    def _add_to_shared_disk(self, disk: CacheTier[ImageKey], key: ImageKey) -> None:
        for victim in self._put_in_tier(disk, key):
            self._drop_record(victim)

    def _drop_from_disk(self, disk: CacheTier[ImageKey], key: ImageKey) -> None:
        disk.remove(key)
        self._drop_record(key)

    # ---- tiers

    def _bytes(self, key: ImageKey) -> int:
        return self._known[key].num_tokens * self.bytes_per_token

    def _bytes_on(self, cache_tier: CacheTier[ImageKey], key: ImageKey) -> int:
        """Return the embedding's size in a tier, in bytes. Files on disk are larger."""
        return self._file_bytes(self._bytes(key)) if cache_tier is self.disk else self._bytes(key)

    def _worth(self, key: ImageKey) -> float:
        """Return the encoding cost per token that a cached embedding saves, times the image's
        popularity.

        Costs per token and per byte are proportional.
        """
        known = self._known[key]
        if known.idle:
            return 0.0
        return self._popularity.of(key) * encode_cost(known.num_tokens) / known.num_tokens

    def _make_room_for(self, key: ImageKey, keep: Collection[ImageKey]) -> list[Move]:
        nbytes = self._bytes(key)
        moves: list[Move] = []
        for victim in self._make_room(self.device, nbytes, keep):
            moves += self._demote(victim)
        self.device.put(key, nbytes, self._worth(key))
        return moves

    def _demote(self, key: ImageKey) -> list[Move]:
        """Move `key` from the device to the host, or drop it if it would be evicted there at once.

        Returns the moves that the workers must execute.
        """
        if self.host is None or self._bytes(key) > self.host.budget_bytes:
            return [Move(key, "device", None, self._drop_record(key))]
        evicted = self._put_in_tier(self.host, key)
        dropped = [
            Move(victim, "device" if victim == key else "host", None, self._drop_record(victim))
            for victim in evicted
        ]
        return (
            dropped
            if key in evicted
            else [*dropped, Move(key, "device", "host", self._known[key].num_tokens)]
        )

    def _put_in_tier(self, cache_tier: CacheTier[ImageKey], key: ImageKey) -> list[ImageKey]:
        cache_tier.put(key, self._bytes_on(cache_tier, key), self._worth(key))
        return self._make_room(cache_tier, 0)

    def _make_room(
        self, cache_tier: CacheTier[ImageKey], nbytes: int, keep: Collection[ImageKey] = ()
    ) -> list[ImageKey]:
        """Call `CacheTier.make_room`, but evict pinned embeddings after all others."""
        if self._pinned.items:
            return self._pinned.make_room(cache_tier, nbytes, keep)
        return cache_tier.make_room(nbytes, keep)

    def _add_record(self, key: ImageKey, num_tokens: int, *, idle: bool = False) -> None:
        if key in self._known:
            return
        self._known[key] = _Record(num_tokens, idle=idle)
        if self._listener is not None:
            self._listener.embedding_stored(key, num_tokens)

    def _drop_record(self, key: ImageKey) -> int:
        """Remove the record of `key` if no tier has it any more. Return its number of tokens."""
        num_tokens = self._known[key].num_tokens
        if self.locate(key) is None:
            if self._pinned.items:
                self._pinned.forget(key)
            del self._known[key]
            if self._listener is not None:
                self._listener.embedding_removed(key)
        return num_tokens
