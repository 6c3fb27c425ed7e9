"""Stores metadata of media files (`media/file_cache.py`) in a database that outlives the server, in
a separate directory.

An entry that cannot be read or written is treated as missing, so the file is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from saccade.core.claims import Claim

log = logging.getLogger("saccade")

T = TypeVar("T")

CLAIM = Claim(".saccade-cards", re.compile(r"cards\.db(-journal)?"))
MAX_ENTRIES = 1 << 16
"""The maximum number of entries, of all kinds together."""
LARGEST = 1 << 16
"""The maximum bytes of an entry. Larger entries are cached in memory only."""
SWEEP = 1 << 10
"""The oldest entries are deleted once per this many writes."""
BUSY_SECONDS = 1.0
"""How long to wait for another server's lock on the database."""


class MetadataStore:
    """Stores metadata in a database in `folder`, on one thread.

    After an error, which is logged and not raised, the store is disabled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder
        self._thread = ThreadPoolExecutor(1, "saccade-cards")
        self._database: sqlite3.Connection | None = None
        self._written = 0

    def __bool__(self) -> bool:
        return self._folder is not None

    async def find(self, kind: str, name: bytes) -> bytes | None:
        """Return the bytes of an entry, or None if it is missing."""
        (found,) = await self.find_all(kind, [name])
        return found

    async def find_all(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the bytes of each entry, with None for missing ones, in one database access."""
        if self._folder is None or not names:
            return [None] * len(names)

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            asked = "SELECT card FROM cards WHERE kind = ? AND name = ? AND length(card) <= ?"
            rows = (database.execute(asked, (kind, name, LARGEST)).fetchone() for name in names)
            return [row[0] if row and isinstance(row[0], bytes) else None for row in rows]

        work = self._thread.submit(self._with_database, read)
        return await asyncio.wrap_future(work) or [None] * len(names)

    def put(self, kind: str, name: bytes, entry: bytes) -> None:
        """Write an entry in the background, unless it has more than `LARGEST` bytes."""
        if self._folder is None or len(entry) > LARGEST:
            return

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("REPLACE INTO cards VALUES (?, ?, ?)", (kind, name, entry))
                if self._written % SWEEP == 0:
                    newest = "(SELECT max(rowid) FROM cards)"
                    database.execute(
                        f"DELETE FROM cards WHERE rowid <= {newest} - ?", (MAX_ENTRIES,)
                    )
                self._written += 1

        self._thread.submit(self._with_database, write)

    def close(self) -> None:
        """Wait until all entries are written, and close the database."""
        self._thread.submit(self._shut)
        self._thread.shutdown()

    def _with_database(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            if self._database is None:
                self._database = self._open()
            return work(self._database) if self._database else None
        except (sqlite3.Error, OSError) as error:
            log.warning("ignoring the metadata in %s: %s", self._folder, error)
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
        self._database = database  # so that `_shut` closes it if the file is not a database
        # No fsync: if an entry is lost in a power failure, the file is just opened again.
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
