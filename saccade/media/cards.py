"""Cards: the few facts worth keeping about opened bytes, by digest, so that a seen file stays
closed. The facts are a header, a video's frames and pace, or a document's pages.

    CardShelf    cards of one kind, typed, in memory: the newest of them
    CardDisk     cards of all kinds in one database, in a folder of our own: outlive the server

A card that cannot be read or written counts as missing: the worst cost is an opening. Cards are
believed only as far as the bytes themselves, since decoders check. Knows nothing of the cards'
content.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from cachetools import LRUCache

from saccade.core.claims import Claim

log = logging.getLogger("saccade")

T = TypeVar("T")

CLAIM = Claim(".saccade-cards", re.compile(r"cards\.db(-journal)?"))
MOST_CARDS = 1 << 16
"""Of one kind in memory, and of all kinds on disk."""
LARGEST = 1 << 16
"""Bytes of a card; a larger one stays in memory."""
SWEEP = 1 << 10
"""Cards written between two looks at how many there are."""
BUSY_SECONDS = 1.0
"""How long another server may hold the database."""


class CardDisk:
    """Keep the cards of `folder`, or of none. All work is on one thread. Errors are logged instead
    of raised.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "saccade-cards")
        self._database: sqlite3.Connection | None = None
        self._written = 0

    def __bool__(self) -> bool:
        return self._folder is not None

    async def find(self, kind: str, name: bytes) -> bytes | None:
        """Return a card's bytes, or `None` if missing."""
        (found,) = await self.find_all(kind, [name])
        return found

    async def find_all(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        """Return several cards' bytes in one look, `None` for each missing card."""
        if self._folder is None or not names:
            return [None] * len(names)

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            asked = "SELECT card FROM cards WHERE kind = ? AND name = ? AND length(card) <= ?"
            rows = (database.execute(asked, (kind, name, LARGEST)).fetchone() for name in names)
            return [row[0] if row and isinstance(row[0], bytes) else None for row in rows]

        work = self._thread.submit(self._with_database, read)
        return await asyncio.wrap_future(work) or [None] * len(names)

    def put(self, kind: str, name: bytes, card: bytes) -> None:
        """Write a card soon, unless it is larger than `LARGEST`."""
        if self._folder is None or len(card) > LARGEST:
            return

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("REPLACE INTO cards VALUES (?, ?, ?)", (kind, name, card))
                if self._written % SWEEP == 0:
                    newest = "(SELECT max(rowid) FROM cards)"
                    database.execute(
                        f"DELETE FROM cards WHERE rowid <= {newest} - ?", (MOST_CARDS,)
                    )
                self._written += 1

        self._thread.submit(self._with_database, write)

    def close(self) -> None:
        """Close the database once all cards are written."""
        self._thread.submit(self._shut)
        self._thread.shutdown()

    def _with_database(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            if self._database is None:
                self._database = self._open()
            return work(self._database) if self._database else None
        except (sqlite3.Error, OSError) as error:
            log.warning("cards in %s are left aside: %s", self._folder, error)
            self._shut()
            self._folder = None
            return None

    def _open(self) -> sqlite3.Connection | None:
        if self._folder is None:
            return None
        CLAIM.take(self._folder)
        file = self._folder / "cards.db"
        if file.is_symlink():
            raise OSError(f"{file.name} is a link")
        database = sqlite3.connect(file, timeout=BUSY_SECONDS, check_same_thread=False)
        self._database = database  # to be closed if the file is no database
        # A card that is lost with the machine's power costs an opening.
        for pragma in ("trusted_schema = OFF", "journal_mode = TRUNCATE", "synchronous = OFF"):
            database.execute(f"PRAGMA {pragma}")
        database.execute(
            "CREATE TABLE IF NOT EXISTS cards "
            "(kind TEXT, name BLOB, card BLOB, PRIMARY KEY (kind, name))"
        )
        return database

    def _shut(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


class CardShelf(Generic[T]):
    """Cards of one kind. `kind` names their form and their maker, the decoder."""

    def __init__(self, disk: CardDisk, kind: str, form: type[T]) -> None:
        self._disk = disk
        self._kind = kind
        self._decoder = msgspec.msgpack.Decoder(form)
        self._cards: LRUCache[bytes, T] = LRUCache(MOST_CARDS)

    def get(self, name: bytes) -> T | None:
        """Return a card in memory."""
        return self._cards.get(name)

    async def find(self, name: bytes) -> T | None:
        """Return a card in memory or on disk."""
        found = self._cards.get(name)
        if found is None and self._disk:
            (found,) = await self.find_all([name])
        return found

    async def find_all(self, names: Sequence[bytes]) -> list[T | None]:
        """Return several cards on disk, in one look."""
        written = await self._disk.find_all(self._kind, names)
        return [
            None if card is None else self._read(name, card)
            for name, card in zip(names, written, strict=True)
        ]

    def _read(self, name: bytes, card: bytes) -> T | None:
        try:
            found = self._cards[name] = self._decoder.decode(card)
        except msgspec.MsgspecError:
            return None
        return found

    def put(self, name: bytes, card: T) -> None:
        self._cards[name] = card
        self._disk.put(self._kind, name, msgspec.msgpack.encode(card))
