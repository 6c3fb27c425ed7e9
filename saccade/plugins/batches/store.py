"""Batches on disk. Each batch has its own database, in a directory within the directory of uploaded
files.

    FOLDER / ID.db      the batch, and for each line its position in the input and its result
    FOLDER / ID.lock    locked by the server that runs the batch

A result is written in one transaction. If a server is killed, only the results of lines in progress
are lost, and these lines are run again. The clients of batches are cached in memory. All methods
block: `runner.py` calls them in threads.
"""

from __future__ import annotations

import fcntl
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from saccade.api.stored_objects import Paging
from saccade.core.client import Client
from saccade.core.decoders import json_decoder
from saccade.core.errors import NotFound, Overloaded, StorageFull
from saccade.plugins.batches.fields import OVER, BatchJob, RequestCounts

_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_OPEN = 64
"""Maximum unfinished batches per client."""
MAX_KEPT = 1000
"""Maximum stored batches per client. Finished ones are removed first."""
BUSY_SECONDS = 10.0
LOST_SECONDS = 60.0
"""The age in seconds after which a batch without its row must be left over from a crash."""
_TABLES = """
CREATE TABLE batch (described BLOB NOT NULL, owner BLOB NOT NULL, lifetime INTEGER,
    cancelled INTEGER NOT NULL);
CREATE TABLE line (number INTEGER PRIMARY KEY, custom_id TEXT NOT NULL UNIQUE,
    start INTEGER NOT NULL, length INTEGER NOT NULL, answered INTEGER, result BLOB);
CREATE INDEX open_line ON line (number) WHERE answered IS NULL;
"""


@dataclass(frozen=True, slots=True)
class InputLine:
    """The position of a line in the input file. `number` counts from 1."""

    number: int
    custom_id: str
    start: int
    length: int


class BatchStore:
    """Stores batches in `folder`, which is created with the first batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._over: set[str] = set()
        self._index: dict[str, tuple[str, int]] = {}
        """The client and creation time of each batch, by ID. They never change."""
        self._broken: set[str] = set()
        self._learning = threading.Lock()

    def add_batch(self, batch: BatchJob, client: Client, lifetime: int | None) -> None:
        """Store a new batch.

        lifetime: the number of seconds for which result files are stored.

        Raises Overloaded if the client has too many unfinished batches, and StorageFull, without
        storing anything, if the disk is full.
        """
        mine = self._ids_of(client.name)
        still = sum(not self._is_over(id, client.name) for id in mine)
        if still >= MAX_OPEN:
            raise Overloaded(
                f"{still} of your batches are in progress, the maximum per client: wait for one to "
                "finish, or cancel one"
            )
        over = [id for id in mine if id in self._over]
        for id in over[: max(0, len(mine) + 1 - MAX_KEPT)]:
            self._forget(id)
        owner = msgspec.json.encode(asdict(client))
        kept = msgspec.json.encode(batch), owner, lifetime
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with self._open(batch.id, new=True) as rows:
                rows.executescript(_TABLES)
                rows.execute("INSERT INTO batch VALUES (?, ?, ?, 0)", kept)
        except (OSError, sqlite3.OperationalError) as error:
            with suppress(OSError):
                self._forget(batch.id)
            raise StorageFull(
                f"the batch cannot be stored on the server's disk: {error}"
            ) from error

    def find_batch(self, id: str, owner: str) -> BatchJob:
        """Find a client's batch. Raises NotFound."""
        with suppress(sqlite3.Error), self._open(id) as rows:
            batch, client, _, _ = _row(rows)
            if client.name == owner:
                batch.request_counts = _counts(rows, batch)
                return batch
        raise NotFound(f"there is no batch {id[:200]!r}", code="batch_not_found")

    def page(self, owner: str, paging: Paging) -> list[BatchJob]:
        """Return a page of the client's batches, and one more batch if there is a next page. Raises
        InvalidRequest.
        """
        found: list[BatchJob] = []
        for id in paging.rest(self._ids_of(owner), str):
            with suppress(NotFound):
                found.append(self.find_batch(id, owner))
            if len(found) > paging.limit:
                break
        return found

    def ids(self) -> list[str]:
        with suppress(FileNotFoundError):
            names = (path.stem for path in self.folder.glob("batch_*.db"))
            return sorted(name for name in names if _ID.fullmatch(name))
        return []

    def open_batches(self, models: Sequence[str]) -> list[tuple[str, str]]:
        """Return (ID, client) of each unfinished batch, oldest first.

        Only batches of these models are returned, and batches that were stored without a model.
        """
        found = []
        for id in self.ids():
            if id in self._over:
                continue
            with suppress(NotFound, sqlite3.Error), self._open(id) as rows:
                batch, client, _, _ = _row(rows)
                with self._learning:
                    self._index[id] = client.name, batch.created_at
                if batch.status in OVER:
                    self._over.add(id)
                elif batch.model is None or batch.model in models:
                    found.append((batch.created_at, id, client.name))
        return [(id, owner) for _, id, owner in sorted(found)]

    def cancel(self, id: str, owner: str) -> BatchJob:
        """Mark a batch as cancelled, so that no more of its lines are started. Raises NotFound."""
        batch = self.find_batch(id, owner)
        if batch.status not in OVER:
            with self._open(id) as rows:
                rows.execute("UPDATE batch SET cancelled = 1")
            batch.status = "cancelling"
            batch.moments["cancelling"] = now()
        return batch

    @contextmanager
    def hold_batch(self, id: str) -> Iterator[BufferedBatch | None]:
        """Lock a batch to run it. Yields None if it is finished, or another process runs it."""
        with ExitStack() as stack:
            held = None
            with suppress(FileNotFoundError, BlockingIOError, NotFound, sqlite3.Error):
                lock = stack.enter_context((self.folder / f"{id}.lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rows = stack.enter_context(self._open(id))
                held = BufferedBatch(rows)
                stack.callback(held.close)
            yield None if held is None or held.batch.status in OVER else held

    def _ids_of(self, owner: str) -> list[str]:
        with self._learning:  # the first thread reads everything, and the others wait for it
            there = set(self.ids())
            for id in self._index.keys() - there:
                del self._index[id]
            for id in there - self._index.keys() - self._broken:
                self._learn(id)
            found = [(made, id) for id, (name, made) in self._index.items() if name == owner]
        return [id for _, id in sorted(found)]

    def _learn(self, id: str) -> None:
        """Read from disk which client a batch belongs to, unless the batch is still being added."""
        try:
            with suppress(sqlite3.Error), self._open(id) as rows:
                batch, client, _, _ = _row(rows)
                self._index[id] = client.name, batch.created_at
        except NotFound:
            with suppress(FileNotFoundError):
                if time.time() - (self.folder / f"{id}.db").stat().st_mtime > LOST_SECONDS:
                    self._broken.add(id)

    def _is_over(self, id: str, owner: str) -> bool:
        """Return True if a batch is finished, or cannot be read now."""
        if id in self._over:
            return True
        with suppress(NotFound):
            if self.find_batch(id, owner).status not in OVER:
                return False
            self._over.add(id)
        return True

    def _forget(self, id: str) -> None:
        for suffix in (".db", ".db-wal", ".db-shm", ".lock"):
            (self.folder / f"{id}{suffix}").unlink(missing_ok=True)

    @contextmanager
    def _open(self, id: str, *, new: bool = False) -> Iterator[sqlite3.Connection]:
        path = self.folder / f"{id}.db"
        if not _ID.fullmatch(id) or not (new or path.is_file()):
            raise NotFound(f"there is no batch {id[:200]!r}", code="batch_not_found")
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        with closing(connection) as rows:
            rows.execute("PRAGMA journal_mode = WAL")
            rows.execute("PRAGMA synchronous = NORMAL")
            yield rows


class BufferedBatch:
    """The lines and results of a batch that this process runs. No other process writes them.

    The thread of a cancelled task may still be running. `close` waits for it, and later calls raise
    sqlite3's error for a closed database.
    """

    def __init__(self, rows: sqlite3.Connection) -> None:
        self._rows = rows
        self._lock = threading.RLock()  # sqlite3 crashes if it is closed during a statement
        self.batch, self.client, self.lifetime, _ = _row(rows)
        found = rows.execute("SELECT coalesce(sum(length(result)), 0) FROM line").fetchone()
        self.result_bytes: int = found[0]

    def close(self) -> None:
        with self._lock:
            self._rows.close()

    def is_cancelled(self) -> bool:
        with self._lock:
            return bool(self._rows.execute("SELECT cancelled FROM batch").fetchone()[0])

    def write(self) -> None:
        """Write the current `batch` to disk."""
        with self._lock:
            self.batch.request_counts = _counts(self._rows, self.batch)
            described = msgspec.json.encode(self.batch)
            self._rows.execute("UPDATE batch SET described = ?", (described,))

    def clear_lines(self) -> None:
        """Delete the lines that an interrupted check of the input has stored."""
        with self._lock:
            self._rows.execute("DELETE FROM line")

    def add_lines(self, lines: Sequence[InputLine]) -> None:
        """Add lines. Raises sqlite3.IntegrityError for a repeated custom_id."""
        with self._transaction():
            self._rows.executemany(
                "INSERT INTO line (number, custom_id, start, length) VALUES (?, ?, ?, ?)",
                ((each.number, each.custom_id, each.start, each.length) for each in lines),
            )

    def drop_lines(self) -> None:
        """Delete the lines. Their counts remain in `batch`."""
        with self._lock:
            self.write()
            with self._transaction():
                self._rows.execute("DELETE FROM line")
            self._rows.execute("VACUUM")

    def open_lines(self, after: int, most: int) -> list[InputLine]:
        """Return at most `most` lines without a result, with numbers above `after`, in order."""
        with self._lock:
            found = self._rows.execute(
                "SELECT number, custom_id, start, length FROM line "
                "WHERE answered IS NULL AND number > ? ORDER BY number LIMIT ?",
                (after, most),
            )
            return [InputLine(*row) for row in found]

    def answer(self, number: int, answered: bool, result: bytes) -> None:
        """Store a line's result: an answer or an error."""
        with self._lock:
            self._rows.execute(
                "UPDATE line SET answered = ?, result = ? WHERE number = ? AND answered IS NULL",
                (answered, result, number),
            )
            self.result_bytes += len(result)

    def results(self, answered: bool) -> Iterator[bytes]:
        """Yield the answers, or the errors, in the order of the input."""
        with self._lock:
            found = self._rows.execute(
                "SELECT result FROM line WHERE answered = ? ORDER BY number", (answered,)
            )
        while True:
            with self._lock:
                row = found.fetchone()
            if row is None:
                return
            yield row[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._rows.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._rows.execute("ROLLBACK")
                raise
            self._rows.execute("COMMIT")


def new_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def now() -> int:
    """Return the time in seconds since the epoch."""
    return int(time.time())


def _row(rows: sqlite3.Connection) -> tuple[BatchJob, Client, int | None, int]:
    """Read the batch's row. Raises NotFound if there is none yet, because the batch is
    being added.
    """
    if (row := rows.execute("SELECT * FROM batch").fetchone()) is None:
        raise NotFound("the stored batch is damaged: create it again", code="batch_not_found")
    described, owner, lifetime, cancelled = row
    batch = json_decoder(BatchJob).decode(described)
    return batch, Client(**msgspec.json.decode(owner)), lifetime, cancelled


def _counts(rows: sqlite3.Connection, batch: BatchJob) -> RequestCounts:
    """Count the lines by outcome, or return the stored counts if the lines were deleted."""
    total, good, bad = rows.execute(
        "SELECT count(*), coalesce(sum(answered = 1), 0), coalesce(sum(answered = 0), 0) FROM line"
    ).fetchone()
    return RequestCounts(total, good, bad) if total else batch.request_counts
