"""Pictures on their way to being encoded: who needs them, whose pixels have arrived, and which to ask the front for.

Owns pixel slots from their arrival until they are given back in `Notices.done`. Knows nothing of embeddings' memory or of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from saccade.core.plan import Encode, PixelSlot
from saccade.core.types import ImageKey
from saccade.sched.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Notices:
    """What the front should hear: pictures to decode first, arena slots to free, pictures that need no decoding ahead any more."""

    want: tuple[ImageKey, ...] = ()
    done: tuple[PixelSlot, ...] = ()
    confirmed: tuple[ImageKey, ...] = ()


class Pictures:
    """Single flight: a picture is asked for once until it arrives, fails, or nobody needs it any more."""

    def __init__(self, look_ahead: int) -> None:
        self._look_ahead = look_ahead
        self._users: dict[ImageKey, list[Sequence]] = {}
        self._arrived: dict[ImageKey, PixelSlot] = {}
        self._asked: set[ImageKey] = set()
        self._ahead: deque[tuple[Sequence, list[ImageKey] | None]] = deque()  # sequences not yet looked at for pictures to ask for
        self._want: list[ImageKey] = []
        self._done: list[PixelSlot] = []
        self._confirmed: list[ImageKey] = []

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

    def needed_by(self, key: ImageKey) -> list[Sequence]:
        """Sequences with tokens still to compute that show the picture."""
        return [sequence for sequence in self._users.get(key, ()) if sequence.needs(key)]

    def has_arrived(self, key: ImageKey) -> bool:
        return key in self._arrived

    def arrive(self, key: ImageKey, slot: PixelSlot, resident: bool) -> list[PixelSlot]:
        """Pixels are there. Returns the slots to give back at once: already there, already encoded, or needed by nobody."""
        self._asked.discard(key)
        if resident or key in self._arrived or not self.needed_by(key):
            return [slot]
        self._arrived[key] = slot
        return []

    def fail(self, key: ImageKey) -> None:
        """Pixels will not come."""
        self._asked.discard(key)

    def yield_all(self) -> list[PixelSlot]:
        """All pixels that have arrived, as if they never had."""
        slots = list(self._arrived.values())
        self._arrived.clear()
        return slots

    def take(self, key: ImageKey) -> PixelSlot:
        """The pixels, for an `Encode`; `encoded` ends the hold."""
        return self._arrived.pop(key)

    def encoded(self, encode: Encode) -> None:
        self._done.append(encode.pixels)
        self._confirmed.append(encode.key)

    def ask(self, key: ImageKey) -> None:
        if key not in self._arrived and key not in self._asked:
            self._asked.add(key)
            self._want.append(key)

    def ask_ahead(self, resident: Callable[[ImageKey], object | None], cached: Callable[[Sequence], int]) -> None:
        """In queue order, ask for pictures that will be needed, while few are under way. `cached`: tokens in the prefix cache."""
        while self._ahead and len(self._asked) + len(self._arrived) < self._look_ahead:
            sequence, keys = self._ahead.popleft()
            if sequence.state is State.FINISHED:
                continue
            if keys is None:
                computed = cached(sequence) if sequence.state is State.WAITING else sequence.computed
                keys = [key for key, end in sequence.last_use.items() if end > computed][::-1]
            if keys:
                key = keys.pop()
                if sequence.needs(key) and resident(key) is None:
                    self.ask(key)
                self._ahead.appendleft((sequence, keys))

    def take_notices(self) -> Notices:
        notices = Notices(tuple(self._want), tuple(self._done), tuple(self._confirmed))
        self._want, self._done, self._confirmed = [], [], []
        return notices
