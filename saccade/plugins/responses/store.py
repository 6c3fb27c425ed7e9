"""Stores responses by ID, for a limited time and within a budget. Each is accessible only to its
client.

A conversation is a chain of turns. Each turn is stored once, even if several responses continue it,
until the last of these is removed. Contents are JSON, which the store does not parse. Everything
runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from saccade.core.client import SHARE, Client
from saccade.core.config import MIB
from saccade.core.errors import NotFound
from saccade.core.metrics import Metrics
from saccade.plugins.responses.options import ResponseOptions

_OVERHEAD = 512
"""Approximate memory of a response or an item in addition to its JSON."""

MAX_KEPT = 10_000
"""Maximum number of stored responses."""
KEPT_SECONDS = 86_400.0
"""Seconds for which a response is stored after its last use."""
Packed = tuple[str, bytes]
"""An item's ID, and the whole item as JSON."""


@dataclass(eq=False, slots=True)
class StoredTurn:
    """The items that one request adds to a conversation: its input, and the answer."""

    items: tuple[Packed, ...]
    answer: tuple[Packed, ...]
    before: StoredTurn | None
    nbytes: int = field(init=False)  # of this turn
    total: int = field(init=False)  # bytes of this turn and all turns before it
    uses: int = field(init=False, default=0)
    """The number of stored responses that end with this turn, and of stored turns that
    follow it.
    """

    def __post_init__(self) -> None:
        packed = (*self.items, *self.answer)
        self.nbytes = sum(len(item) for _, item in packed) + len(packed) * _OVERHEAD
        self.total = self.nbytes + (0 if self.before is None else self.before.total)

    def chain(self) -> list[StoredTurn]:
        """Return all turns up to this one, in order."""
        turns = list(self._back())
        turns.reverse()
        return turns

    def _back(self) -> Iterator[StoredTurn]:
        turn: StoredTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response: its body as JSON, its last turn, and the time at which it expires."""

    id: str
    body: bytes
    turn: StoredTurn
    until: float


class OwnResponses:
    """The responses of one client, ordered by their last use, the least recent first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, bytes] = {}
        """The items in all turns of the client, by ID."""
        self.nbytes = 0

    def put(self, response: StoredResponse) -> None:
        self.kept[response.id] = response
        self.nbytes += len(response.body) + _OVERHEAD
        turn: StoredTurn | None = response.turn
        while turn is not None:
            turn.uses += 1
            if turn.uses > 1:
                break
            self.nbytes += turn.nbytes
            self.items.update((*turn.items, *turn.answer))
            turn = turn.before

    def drop(self, response_id: str) -> None:
        response = self.kept.pop(response_id)
        self.nbytes -= len(response.body) + _OVERHEAD
        turn: StoredTurn | None = response.turn
        while turn is not None:
            turn.uses -= 1
            if turn.uses:
                break
            self.nbytes -= turn.nbytes
            for item_id, item in (*turn.items, *turn.answer):
                if self.items.get(item_id) is item:
                    del self.items[item_id]
            turn = turn.before


class ResponseStore:
    """Stores the responses of all clients."""

    def __init__(
        self,
        options: ResponseOptions,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        most: int = MAX_KEPT,
        instance: str = "",
    ) -> None:
        """Create an empty store.

        instance: a prefix of response IDs, which is unique to this process.
        """
        self._budget_bytes = options.responses_mb * MIB
        self._most = most
        self._metrics = metrics
        self._clock = clock
        self._by_client: dict[str, OwnResponses] = {}
        self.instance = instance
        """Identifies this store among several servers. Response IDs start with it, so that a router
        can find the server that has a conversation.
        """

    def name(self) -> str:
        """Return a new ID for a response."""
        return f"resp_{self.instance}{secrets.token_hex(20)}"

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self._by_client.values())

    def __len__(self) -> int:
        return sum(len(own.kept) for own in self._by_client.values())

    def keep(self, client: Client, response_id: str, body: bytes, turn: StoredTurn) -> None:
        """Store a response, and evict responses that exceed the budget. This may evict the new
        response, too.
        """
        self._expire()
        own = self._by_client.setdefault(client.name, OwnResponses())
        own.put(StoredResponse(response_id, body, turn, self._clock() + KEPT_SECONDS))
        share = SHARE if client.limited else 1.0
        while own.nbytes > self._budget_bytes * share or len(own.kept) > self._most * share:
            own.drop(next(iter(own.kept)))
        while self.nbytes > self._budget_bytes or len(self) > self._most:
            oldest = min((each for each in self._by_client.values() if each.kept), key=_last_used)
            oldest.drop(next(iter(oldest.kept)))
        self._count()

    def fits(self, client: Client, nbytes: int) -> bool:
        """Return True if a conversation of `nbytes` bytes fits the budget of an empty store."""
        return self._most > 0 and nbytes <= self._budget_bytes * (SHARE if client.limited else 1.0)

    def find(self, client: Client, response_id: str, param: str) -> StoredResponse:
        """Return a response of this client, and extend its lifetime.

        Raises NotFound if it is unknown, or belongs to another client.
        """
        self._expire()
        own = self._by_client.get(client.name)
        if own is None or response_id not in own.kept:
            raise NotFound(
                f"{param}: response {response_id[:200]!r} not found. It may have been created with "
                "store=false or another API key, deleted, expired, or evicted (--tune "
                "responses_mb). Send the whole conversation instead.",
                param,
                "response_not_found",
            )
        found = own.kept.pop(response_id)
        found = StoredResponse(found.id, found.body, found.turn, self._clock() + KEPT_SECONDS)
        own.kept[response_id] = found
        return found

    def item(self, client: Client, item_id: str, param: str) -> bytes:
        """Return an item of a stored conversation, as JSON. Raises NotFound if it is unknown."""
        self._expire()
        own = self._by_client.get(client.name)
        if own is None or item_id not in own.items:
            raise NotFound(
                f"{param}: there is no item {item_id[:200]!r}: no stored response contains it: "
                "send the item itself",
                param,
                "item_not_found",
            )
        return own.items[item_id]

    def delete(self, client: Client, response_id: str, param: str) -> None:
        """Delete a response. Turns that other responses continue remain stored.

        Raises NotFound if it is unknown, or belongs to another client.
        """
        self.find(client, response_id, param)
        self._by_client[client.name].drop(response_id)
        self._count()

    def _expire(self) -> None:
        now = self._clock()
        for name, own in list(self._by_client.items()):
            while own.kept and next(iter(own.kept.values())).until <= now:
                own.drop(next(iter(own.kept)))
            if not own.kept:
                del self._by_client[name]
        self._count()

    def _count(self) -> None:
        self._metrics.set("saccade_stored_responses", len(self))
        self._metrics.set("saccade_stored_responses_bytes", self.nbytes)


def _last_used(own: OwnResponses) -> float:
    return next(iter(own.kept.values())).until
