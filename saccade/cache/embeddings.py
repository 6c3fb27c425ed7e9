"""The tier and the weight of each image's embedding. Decides which embeddings go when room is
needed. Also how often images were shown, and how they were encoded.

Owns the bookkeeping. The workers have the tensors and execute the `Move`s.

Embeddings pinned by clients (`pins.py`) leave a tier last.

    encode ──▶ device ◀──────▶ host         an embedding is on the device or on the host, not both
                  │ ▲
             save │ └── staged ◀── disk      what is saved stays on disk, wherever else it is;
                  └───────────────▲         reading happens in the background
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
"""Uses per cached image after which counts are halved."""
MIN_CACHED_IMAGES = 100
"""Fewer cached images count as this many."""
KEYS_PER_DIGEST = 8


class Popularity:
    """Counts of uses. `use` adds one, and `of` returns a count from 1 to `MAX_USES_COUNTED`."""

    def __init__(self) -> None:
        self._counts: dict[ImageKey, float] = {}
        self._since = 0

    def __len__(self) -> int:
        return len(self._counts)

    def use(self, key: ImageKey, cached: int) -> None:
        """Count a sequence that shows `key`, while `cached` images are cached.

        At most `USES_PER_CACHED_IMAGE` keys per cached one are added between two halvings.
        """
        self._counts[key] = self._counts.get(key, 0.0) + 1.0
        self._since += 1
        if self._since >= USES_PER_CACHED_IMAGE * max(MIN_CACHED_IMAGES, cached):
            self._since = 0
            self._counts = {key: uses / 2 for key, uses in self._counts.items() if uses >= 1.0}

    def of(self, key: ImageKey) -> float:
        return min(MAX_USES_COUNTED, max(1.0, self._counts.get(key, 0.0)))


class GhostList:
    """The last `size` images of all salts, each with the settings of its last encodings.

    What one salt has seen stays hidden from the others.
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._settings: OrderedDict[tuple[bytes, str], tuple[bytes, ...]] = OrderedDict()

    def add(self, key: ImageKey) -> None:
        """Record that `key` is being encoded."""
        image = key.digest, key.salt
        others = tuple(each for each in self._settings.pop(image, ()) if each != key.settings)
        self._settings[image] = (*others[1 - KEYS_PER_DIGEST :], key.settings)
        if len(self._settings) > self._size:
            self._settings.popitem(last=False)

    def why_missing(self, key: ImageKey) -> Missed:
        """Return why the embedding of `key` is missing."""
        settings = self._settings.get((key.digest, key.salt))
        if settings is None:
            return "never seen"
        return "evicted" if key.settings in settings else "other settings"


QUADRATIC_TOKENS = 2048
"""An image of so many tokens costs the vision tower as much for attention as for everything else
(about 6 x width patches of Qwen3-VL).
"""
FIXED_TOKENS = 32
"""Cost of an image regardless of its size, in tokens."""


def encode_cost(num_tokens: int) -> float:
    """Compute the cost of encoding an image, in tokens of a small image.

    The cost counts linear layers, full attention, and a fixed part.
    """
    return FIXED_TOKENS + num_tokens * (1 + num_tokens / QUADRATIC_TOKENS)


Worth = Callable[[int, float, int], float]
"""worth(tokens, popularity, uses): what the place of an embedding is worth, per byte. `uses`: how
often it was shown since it came.
"""


def saved_encoding(num_tokens: int, popularity: float, _uses: int) -> float:
    """Compute the encoding saved per token, and so per byte, times the image's popularity."""
    return popularity * encode_cost(num_tokens) / num_tokens


@dataclass(slots=True)
class _Known:
    """An embedding in some tier. idle: not awaited yet, so evicted first."""

    num_tokens: int
    uses: int = 0
    idle: bool = False


class EmbeddingCache:
    """Embeddings by key.

    A pinned embedding stays on the device, even beyond the budget.
    """

    def __init__(
        self,
        budgets: EmbeddingBudgets,
        bytes_per_token: int,
        on_disk: Iterable[tuple[ImageKey, int]] = (),
        worth: Worth = saved_encoding,
        pins: PinTable[ImageKey] | None = None,
        file_bytes: Callable[[int], int] = embedding_file_bytes,
    ) -> None:
        """Start with the embeddings on disk.

        `on_disk`: (key, tokens) of embeddings saved by an earlier run, the least recently used
        first.

        `pins`: an empty book, whose share is in bytes. None disables pins.

        `file_bytes`: maps an embedding's bytes to its bytes on disk.
        """
        self._worth_of = worth
        self._file_bytes = file_bytes
        self.bytes_per_token = bytes_per_token
        self.pins = PinTable() if pins is None else pins
        self._pinned = PinnedItems(self.pins)
        self.device = self._pinned.tier(budgets.device_bytes)
        self.tiers: dict[Tier, CacheTier[ImageKey]] = {"device": self.device}
        """Those that the server has, the nearest first."""
        if budgets.host_bytes:
            self.tiers["host"] = self._pinned.tier(budgets.host_bytes)
        if budgets.disk_bytes or budgets.folder is not None:
            self.tiers["disk"] = self._pinned.tier(budgets.disk_bytes, shared=budgets.shared)
        self.host, self.disk = self.tiers.get("host"), self.tiers.get("disk")
        self.hits: Counter[Tier] = Counter()
        self.misses: Counter[Tier] = Counter()
        self._seen = GhostList()
        self._popularity = Popularity()
        self._known: dict[ImageKey, _Known] = {}
        self._listener: EmbeddingListener | None = None
        self._staged: set[ImageKey] = set()
        self.beyond_budget = self._begin(self.disk, on_disk) if self.disk is not None else []
        """Files of an earlier run for which the disk tier has no room now."""

    def _begin(
        self, disk: CacheTier[ImageKey], found: Iterable[tuple[ImageKey, int]]
    ) -> list[Move]:
        for key, num_tokens in found:
            self._seen.add(key)
            self._known[key] = _Known(num_tokens)
            disk.put(key, self._bytes_on(disk, key), self._worth(key))
        return [Move(key, "disk", None, self._forget(key)) for key in disk.make_room(0)]

    def listen(self, listener: EmbeddingListener) -> None:
        """Report the embeddings that there are, and all that are stored or removed from now on.

        An embedding is stored once its encoding starts, and removed once no tier has it.
        """
        self._listener = listener
        for key, known in self._known.items():
            listener.embedding_stored(key, known.num_tokens)

    @property
    def keys_being_read(self) -> Collection[ImageKey]:
        """Embeddings being read from disk."""
        return self.disk.held if self.disk is not None else ()

    @property
    def staged(self) -> Collection[ImageKey]:
        """Embeddings read from disk, to be copied to the device."""
        return self._staged

    def locate(self, key: ImageKey) -> Place | None:
        """Return the embedding's nearest place, or None if uncached."""
        if key in self._staged:
            return "staged"
        for tier, cache_tier in self.tiers.items():
            if key in cache_tier:
                return tier
        return None

    def num_tokens(self, key: ImageKey) -> int | None:
        """Return an embedding's tokens, or None if uncached."""
        known = self._known.get(key)
        return None if known is None else known.num_tokens

    def ready(self, key: ImageKey) -> bool:
        """Return True if the embedding can be shown in the step being planned."""
        return self.locate(key) not in (None, "disk")

    def on_disk(self, key: ImageKey) -> bool:
        """Return True if the embedding is on disk alone, and must be read."""
        return self.locate(key) == "disk"

    def count_lookup(self, place: Place | None) -> None:
        """Count a sequence's lookup of an embedding: a hit at `place`, and misses above."""
        found = "disk" if place == "staged" else place
        for tier in self.tiers:
            if tier == found:
                self.hits[tier] += 1
                return
            self.misses[tier] += 1

    def why_missing(self, key: ImageKey) -> Missed:
        """Return why `key` is missing."""
        return self._seen.why_missing(key)

    def pin(self, key: ImageKey, *, idle: bool = False) -> None:
        """Keep `key` on the device for a sequence that shows it.

        It stays until as many `unpin`s. idle: the sequence is unawaited, so this is left out of
        `uses`.
        """
        if not idle:
            self._popularity.use(key, len(self._known))
            self._known[key].uses += 1
            self._known[key].idle = False
        self.device.use(key, self._worth(key))
        self.device.hold(key)

    def unpin(self, key: ImageKey) -> None:
        """End one `pin`."""
        self.device.release(key)

    def hold(self, key: ImageKey) -> None:
        """Keep `key` on the device for a sequence about to show it, until as many `release`s."""
        self.device.hold(key)

    def release(self, key: ImageKey) -> None:
        """End one `hold`."""
        self.device.release(key)

    def fits(self, num_tokens: int) -> bool:
        """Return True if the device's budget allows `num_tokens` more.

        Anything fits unless embeddings are held: an image may exceed the budget.
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
        """Make room for `key`, whose encoding begins. Returns the necessary moves.

        `keep` stay on the device if possible. idle: encoded before anyone waits for it.
        """
        assert not self.ready(key), "encoded though it is there"
        self._seen.add(key)
        self._know(key, num_tokens, idle=idle)
        assert self._known[key].num_tokens == num_tokens
        return self._make_room_for(key, keep)

    def to_device(self, key: ImageKey, keep: Collection[ImageKey] = ()) -> list[Move]:
        """Move `key`, on the host or staged, to the device.

        Returns the necessary moves, the move of `key` last.
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
        """Make room on disk for the newly encoded `key`.

        Returns the necessary moves, and True if the embedding is worth that room.
        """
        disk = self.disk
        if disk is None or key in disk or self._bytes_on(disk, key) > disk.budget_bytes:
            return [], False
        if disk.shared:
            self._shelve_known(disk, key)
            return [], True
        evicted = self._put_in_tier(disk, key)
        return [
            Move(victim, "disk", None, self._forget(victim)) for victim in evicted if victim != key
        ], key not in evicted

    def flush(self, disk: bool = True) -> list[Move]:
        """Forget every unheld embedding in every tier, and every pin. Returns the moves.

        The disk is cleared only with `disk`. Embeddings held on the device, being read or staged
        stay, on disk too.
        """
        self._pinned.clear()
        keep = {*self.device.held, *self.keys_being_read, *self._staged}
        return [
            Move(key, tier, None, self._forget(key))
            for tier, cache_tier in self.tiers.items()
            if disk or tier != "disk"
            for key in cache_tier.clear(keep)
        ]

    def shrink(self, nbytes: int) -> list[Move]:
        """Drop about `nbytes` of embeddings from memory, or all that are unheld and unpinned.

        Saved ones stay on disk. Returns the moves.
        """
        moves: list[Move] = []
        places: Sequence[Tier] = ("host", "device")
        for place in places:
            for key in self.tiers[place].shed(nbytes) if place in self.tiers else ():
                nbytes -= self._bytes(key)
                moves.append(Move(key, place, None, self._forget(key)))
        return moves

    # ---- what clients ask to be kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of pinned embeddings."""
        return self._pinned.nbytes

    def pin_for_client(self, key: ImageKey, client: str, seconds: int) -> None:
        """Pin `key` for a client for `seconds`, in whatever tier.

        Ignores an unknown embedding, and one larger than the client's part of the share.
        """
        if self.locate(key) is not None:
            self._pinned.pin([(key, self._bytes(key))], client, seconds)

    def hit(self, key: ImageKey, client: str) -> None:
        """Renew a client's pin on `key`, if any, as the client names `key` again."""
        if self._pinned.items:
            self._pinned.hit([key], client)

    def end_pins(self) -> None:
        """Drop the pins past their time."""
        self._pinned.end_due()

    # ---- reading from disk, in the background

    def fetch(self, key: ImageKey) -> Move:
        """Begin to read `key` from disk. `fetched` ends the read."""
        assert self.disk is not None and self.on_disk(key)
        self.disk.use(key, self._worth(key))
        self.disk.hold(key)
        return Move(key, "disk", "staged", self._known[key].num_tokens)

    def fetched(self, key: ImageKey, whole: bool) -> None:
        """End a read from disk. After a failed read the embedding counts as removed, so that the
        read is tried only once.
        """
        assert self.disk is not None
        self.disk.release(key)
        if whole:
            self._staged.add(key)
        else:
            self._lose(self.disk, key)

    def unstage(self, key: ImageKey) -> Move:
        """Drop a staged embedding that is needed no more. Returns the move."""
        self._staged.remove(key)
        return Move(key, "staged", None, self._forget(key))

    def not_saved(self, key: ImageKey) -> None:
        """Drop an embedding whose writing failed. A read in progress will fail too, and `fetched`
        then drops it.
        """
        if self.disk is not None and key in self.disk and key not in self.disk.held:
            self._lose(self.disk, key)

    def not_encoded(self, key: ImageKey) -> None:
        """Drop an admitted, unheld embedding whose encoding failed."""
        self.device.remove(key)
        self._forget(key)

    # ---- a disk that other servers write, too

    def seen_in_store(self, image: Image, there: bool) -> None:
        """Record whether a look at a shared disk found the embedding (`there`).

        `disk` then lists the embeddings known to this server, and forgetting one leaves its file.
        """
        key, disk = image.key, self.disk
        if not there:
            self.not_saved(key)
        elif disk is not None and key not in disk:
            self._seen.add(key)
            self._know(key, image.num_tokens)
            self._shelve_known(disk, key)

    def _shelve_known(self, disk: CacheTier[ImageKey], key: ImageKey) -> None:
        for victim in self._put_in_tier(disk, key):
            self._forget(victim)

    def _lose(self, disk: CacheTier[ImageKey], key: ImageKey) -> None:
        disk.remove(key)
        self._forget(key)

    # ---- tiers

    def _bytes(self, key: ImageKey) -> int:
        return self._known[key].num_tokens * self.bytes_per_token

    def _bytes_on(self, cache_tier: CacheTier[ImageKey], key: ImageKey) -> int:
        """Return the embedding's bytes in a tier. Files on disk are larger."""
        return self._file_bytes(self._bytes(key)) if cache_tier is self.disk else self._bytes(key)

    def _worth(self, key: ImageKey) -> float:
        known = self._known[key]
        if known.idle:
            return 0.0
        return self._worth_of(known.num_tokens, self._popularity.of(key), known.uses)

    def _make_room_for(self, key: ImageKey, keep: Collection[ImageKey]) -> list[Move]:
        nbytes = self._bytes(key)
        moves: list[Move] = []
        for victim in self._make_room(self.device, nbytes, keep):
            moves += self._demote(victim)
        self.device.put(key, nbytes, self._worth(key))
        return moves

    def _demote(self, key: ImageKey) -> list[Move]:
        """Move `key` from the device to the host, if it is worth its room there."""
        if self.host is None or self._bytes(key) > self.host.budget_bytes:
            return [Move(key, "device", None, self._forget(key))]
        evicted = self._put_in_tier(self.host, key)
        dropped = [
            Move(victim, "device" if victim == key else "host", None, self._forget(victim))
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
        """Make room as `CacheTier.make_room` does, with care for what clients have pinned."""
        if self._pinned.items:
            return self._pinned.make_room(cache_tier, nbytes, keep)
        return cache_tier.make_room(nbytes, keep)

    def _know(self, key: ImageKey, num_tokens: int, *, idle: bool = False) -> None:
        if key in self._known:
            return
        self._known[key] = _Known(num_tokens, idle=idle)
        if self._listener is not None:
            self._listener.embedding_stored(key, num_tokens)

    def _forget(self, key: ImageKey) -> int:
        """Drop all facts about `key` if it has left every tier. Returns its tokens."""
        num_tokens = self._known[key].num_tokens
        if self.locate(key) is None:
            if self._pinned.items:
                self._pinned.forget(key)
            del self._known[key]
            if self._listener is not None:
                self._listener.embedding_removed(key)
        return num_tokens
