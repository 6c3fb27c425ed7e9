"""Pictures on their way to being shown: who needs them, whose pixels have arrived, which to ask the
front for or to read from disk.

Owns pixel slots from their arrival until they are given back in `Notices.done`. Knows nothing of
embeddings' memory or of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from saccade.core.plan import Encode, PixelSlot
from saccade.core.types import ImageKey
from saccade.sched.sequence import Sequence, State

ROUNDING = 7
"""Patches that a slot may cost more than its picture has: slots begin on a page of memory."""


@dataclass(frozen=True, slots=True)
class Notices:
    """What the front should hear: pictures to decode first, arena slots to free, pictures that need
    no decoding ahead any more.
    """

    want: tuple[ImageKey, ...] = ()
    done: tuple[PixelSlot, ...] = ()
    confirmed: tuple[ImageKey, ...] = ()


class Pictures:
    """Single flight: a picture is asked for once until it arrives, fails, or nobody needs it any
    more.

    Never more is asked for than the arena has room for (one picture always may be); what is
    `refused` is to be asked for again later. A read from disk cannot be called off: what nobody
    needs when it ends is let go of then.
    """

    def __init__(
        self,
        look_ahead: int,
        room: int,
        on_disk: Callable[[ImageKey], bool],
        confirmed: Iterable[ImageKey],
    ) -> None:
        """`room`: patches in the arena.

        `confirmed`: known from an earlier run, so that the front need not decode them ahead.
        """
        self.refused = False  # since this was last set to False
        self._look_ahead = look_ahead
        self._room = room
        self._on_disk = on_disk
        self._users: dict[ImageKey, list[Sequence]] = {}
        self._arrived: dict[ImageKey, PixelSlot] = {}
        self._asked: set[ImageKey] = set()
        self._ahead: deque[tuple[Sequence, list[ImageKey] | None]] = (
            deque()
        )  # sequences not yet looked at for pictures to ask for
        self._want: list[ImageKey] = []
        self._done: list[PixelSlot] = []
        self._confirmed: list[ImageKey] = list(confirmed)
        self._fetching: set[ImageKey] = set()
        self._staged: set[ImageKey] = set()
        self._fetch: list[ImageKey] = []
        self._unstage: list[ImageKey] = []

    @property
    def reading(self) -> bool:
        """Whether anything is being read from disk."""
        return bool(self._fetching)

    @property
    def busy(self) -> bool:
        """Whether anything that was read from disk, or is being read, is still to be dealt with."""
        return bool(self._fetching or self._staged or self._unstage)

    @property
    def held(self) -> int:
        """Pictures whose pixels lie in the arena for us."""
        return len(self._arrived)

    def join(self, sequence: Sequence) -> None:
        """A new sequence may need its pictures."""
        for key in sequence.last_use:
            self._users.setdefault(key, []).append(sequence)
        if sequence.last_use:
            self._ahead.append((sequence, None))

    def leave(self, sequence: Sequence) -> None:
        """A finished sequence needs nothing."""
        for key in sequence.last_use:
            self._users[key].remove(sequence)
            if not self._users[key]:
                del self._users[key]
            self.settle(key)

    def settle(self, key: ImageKey) -> None:
        """Give the pixels back, and forget having asked, if nobody needs them any more."""
        if (key in self._arrived or key in self._asked) and not self.needed_by(key):
            self._asked.discard(key)
            if key in self._arrived:
                self._done.append(self._arrived.pop(key))
        if key in self._staged and not self.needed_by(key):
            self._staged.remove(key)
            self._unstage.append(key)

    def needed_by(self, key: ImageKey) -> list[Sequence]:
        """Sequences with tokens still to compute that show the picture."""
        return [sequence for sequence in self._users.get(key, ()) if sequence.needs(key)]

    def has_arrived(self, key: ImageKey) -> bool:
        return key in self._arrived

    def on_the_way(self, key: ImageKey) -> bool:
        return key in self._asked

    def arrive(self, key: ImageKey, slot: PixelSlot, resident: bool) -> list[PixelSlot]:
        """Pixels are there.

        Returns the slots to give back at once: already there, already encoded, or needed by nobody.
        """
        self._asked.discard(key)
        if resident or key in self._arrived or not self.needed_by(key):
            return [slot]
        self._arrived[key] = slot
        return []

    def fail(self, key: ImageKey) -> None:
        """Pixels will not come."""
        self._asked.discard(key)

    def yield_for(self, key: ImageKey) -> bool:
        """Give back all pixels that have arrived, as if they never had, and ask for `key` first.

        Whether anything was given back.
        """
        slots = list(self._arrived.values())[::-1]  # the front drops the first of them first
        self._arrived.clear()
        self._done += slots
        self.ask(key)
        return bool(slots)

    def take(self, key: ImageKey) -> PixelSlot:
        """The pixels, for an `Encode`; `encoded` ends the hold."""
        return self._arrived.pop(key)

    def encoded(self, encode: Encode) -> None:
        self._done.append(encode.pixels)
        self._confirmed.append(encode.key)

    def ask(self, key: ImageKey) -> bool:
        """Whether the picture is on its way; False when it has to wait for room in the arena."""
        if (
            key in self._arrived
            or key in self._asked
            or key in self._fetching
            or key in self._staged
        ):
            return True
        if self._on_disk(key):
            self._fetching.add(key)
            self._fetch.append(key)
            return True
        under_way = (*self._asked, *self._arrived)
        if under_way and sum(map(self._patches, (key, *under_way))) > self._room:
            self.refused = True
            return False
        self._asked.add(key)
        self._want.append(key)
        return True

    def _patches(self, key: ImageKey) -> int:
        """What a picture that is needed takes of the arena."""
        images = self._users[key][0].request.images
        return ROUNDING + next(image.num_patches for image in images if image.key == key)

    def fetched(self, key: ImageKey, whole: bool) -> None:
        """A read from disk has ended; if it is not `whole`, the picture must be asked for again."""
        self._fetching.remove(key)
        if whole:
            self._staged.add(key)
            self.settle(key)

    def brought(self, key: ImageKey) -> None:
        """What was read from disk has gone to the device."""
        self._staged.discard(key)

    def take_reads(self) -> tuple[list[ImageKey], list[ImageKey]]:
        """What to begin to read from disk, and what to let go of that was read, once."""
        reads = self._fetch, self._unstage
        self._fetch, self._unstage = [], []
        return reads

    def ask_ahead(
        self, ready: Callable[[ImageKey], bool], cached: Callable[[Sequence], int]
    ) -> None:
        """In queue order, ask for pictures that will be needed, while few are under way.

        `cached`: tokens in the prefix cache.
        """
        while self._ahead and self._under_way() < self._look_ahead:
            sequence, keys = self._ahead.popleft()
            if sequence.state is State.FINISHED:
                continue
            if keys is None:
                computed = (
                    cached(sequence) if sequence.state is State.WAITING else sequence.computed
                )
                keys = [key for key, end in sequence.last_use.items() if end > computed][::-1]
            if keys:
                self._ahead.appendleft((sequence, keys))
                key = keys[-1]
                if sequence.needs(key) and not ready(key) and not self.ask(key):
                    return
                keys.pop()

    def _under_way(self) -> int:
        return len(self._asked) + len(self._arrived) + len(self._fetching) + len(self._staged)

    def take_notices(self) -> Notices:
        notices = Notices(tuple(self._want), tuple(self._done), tuple(self._confirmed))
        self._want, self._done, self._confirmed = [], [], []
        return notices
