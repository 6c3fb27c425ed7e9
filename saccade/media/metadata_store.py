"""Metadata: the few facts worth keeping about opened bytes, by digest, so that a seen file stays
closed. The facts are a header, a video's frames and pace, or a document's pages.

    MetadataCache    metadata of one kind, typed, in memory: the newest of them
    MetadataStore     metadata of all kinds in one database, in a folder of our own: outlives the
    server

An entry that cannot be read or written counts as missing: the worst cost is an opening. Entries
are believed only as far as the bytes themselves, since decoders check. Knows nothing of their
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
from saccade.core.decoders import msgpack_decoder

log = logging.getLogger("saccade")

T = TypeVar("T")

CLAIM = Claim(".saccade-cards", re.compile(r"cards\.db(-journal)?"))
MOST_ENTRIES = 1 << 16
"""Of one kind in memory, and of all kinds on disk."""
LARGEST = 1 << 16
"""Bytes of an entry; a larger one stays in memory."""
SWEEP = 1 << 10
"""Entries written between two looks at how many there are."""
BUSY_SECONDS = 1.0
"""How long another server may hold the database."""


class MetadataStore:
    """Keep the metadata of `folder`. All work is on one thread. Errors are logged instead of
    raised, and end the use of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder
        self._thread = ThreadPoolExecutor(1, "saccade-cards")
        self._database: sqlite3.Connection | None = None
        self._written = 0

    def __bool__(self) -> bool:
        return self._folder is not None

    async def find(self, kind: str, name: bytes) -> bytes | None:
        """Return an entry's bytes, or `None` if missing."""
        (found,) = await self.find_all(kind, [name])
        return found

    async def find_all(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        """Return several entries' bytes in one look, `None` for each missing one."""
        if self._folder is None or not names:
            return [None] * len(names)

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            asked = "SELECT card FROM cards WHERE kind = ? AND name = ? AND length(card) <= ?"
            rows = (database.execute(asked, (kind, name, LARGEST)).fetchone() for name in names)
            return [row[0] if row and isinstance(row[0], bytes) else None for row in rows]

        work = self._thread.submit(self._with_database, read)
        return await asyncio.wrap_future(work) or [None] * len(names)

    def put(self, kind: str, name: bytes, entry: bytes) -> None:
        """Write an entry soon, unless it is larger than `LARGEST`."""
        if self._folder is None or len(entry) > LARGEST:
            return

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("REPLACE INTO cards VALUES (?, ?, ?)", (kind, name, entry))
                if self._written % SWEEP == 0:
                    newest = "(SELECT max(rowid) FROM cards)"
                    database.execute(
                        f"DELETE FROM cards WHERE rowid <= {newest} - ?", (MOST_ENTRIES,)
                    )
                self._written += 1

        self._thread.submit(self._with_database, write)

    def close(self) -> None:
        """Close the database once all entries are written."""
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
        CLAIM.claim_folder(self._folder)
        file = self._folder / "cards.db"
        if file.is_symlink():
            raise OSError(f"{file.name} is a link")
        database = sqlite3.connect(file, timeout=BUSY_SECONDS, check_same_thread=False)
        self._database = database  # to be closed if the file is no database
        # An entry that is lost with the machine's power costs an opening.
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


class MetadataCache(Generic[T]):
    """Metadata of one kind. `kind` names their form and their maker, the decoder. Without `disk`,
    it is in memory alone.
    """

    def __init__(self, disk: MetadataStore | None, kind: str, form: type[T]) -> None:
        self._disk = disk
        self._kind = kind
        self._decoder = msgpack_decoder(form)
        self._entries: LRUCache[bytes, T] = LRUCache(MOST_ENTRIES)

    def get(self, name: bytes) -> T | None:
        """Return an entry in memory."""
        return self._entries.get(name)

    async def find(self, name: bytes) -> T | None:
        """Return an entry in memory or on disk."""
        found = self._entries.get(name)
        if found is None and self._disk:
            (found,) = await self.find_all([name])
        return found

    async def find_all(self, names: Sequence[bytes]) -> list[T | None]:
        """Return several entries on disk, in one look."""
        if self._disk is None:
            return [None] * len(names)
        written = await self._disk.find_all(self._kind, names)
        return [
            None if entry is None else self._read(name, entry)
            for name, entry in zip(names, written, strict=True)
        ]

    def _read(self, name: bytes, entry: bytes) -> T | None:
        try:
            found = self._entries[name] = self._decoder.decode(entry)
        except msgspec.MsgspecError:
            return None
        return found

    def put(self, name: bytes, entry: T) -> None:
        self._entries[name] = entry
        if self._disk is not None:
            self._disk.put(self._kind, name, msgspec.msgpack.encode(entry))
