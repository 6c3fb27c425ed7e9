"""The disk tier: a directory that belongs to one server, with a safetensors file for each item.

A file is written under a temporary name and renamed when complete. A file that does not match its
name (`items.py`) is removed when it is listed or read. Files that could not be read stay, because
the error may be temporary, and files with other names are ignored. The directory and its files must
belong to this server's user, because any other user with write access could forge them. For items
that require it (`Items.lone`), the directory is locked. If the directory is a symbolic link, writes
are refused.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import torch

from saccade.core.claims import made_beside, opened_folder
from saccade.plugins.tiers.items import (
    Damaged,
    Items,
    Memory,
    discard,
    open_whole,
    read_header,
    write_header,
)
from saccade.runtime.tiers import Ready, values_of

log = logging.getLogger("saccade")

LOCK_SECONDS = 5.0
PRIVATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW

K = TypeVar("K", bound=Hashable)


class Folder(Generic[K]):
    """Stores items of one type in the directory `root`/`items.folder`."""

    shared = ""

    def __init__(self, root: Path, items: Items[K], memory: Memory, _nbytes: int) -> None:
        """Open or create the directory.

        memory: allocates the rows that items are read into. _nbytes: not used, because the engine's
        index keeps the items within the budget.

        Raises OSError with the reason if the directory cannot be opened, belongs to another user,
        or is used by another server.
        """
        self.what = items.what
        self._items = items
        self._memory = memory
        self._user: int | None = None
        self._lock: int | None = None
        self.folder = root / items.folder
        user = items.layout.claim.claim_folder(root)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.found = self._begin(user)

    def _begin(self, user: int) -> tuple[tuple[K, int], ...]:
        """Check the owner of the directory, lock it if required, and return the items that an
        earlier run left.

        user: this server's user ID.
        """
        remedy = (
            ", who could plant files that this server reads: remove it, or choose another directory"
        )
        self._own(user, remedy)
        if self._items.lone:
            self._lock = locked(self.folder / "lock")
        with opened_folder(self.folder):
            return self._scan()

    def _scan(self) -> tuple[tuple[K, int], ...]:
        """Return (key, size) of the valid files, the oldest first. Removes damaged files."""
        layout, whole = self._items.layout, list[tuple[int, K, int]]()
        for entry in os.scandir(self.folder):
            try:
                if layout.draft.fullmatch(entry.name):
                    raise Damaged("it is incomplete")
                if layout.file.fullmatch(entry.name):
                    seen = entry.stat(follow_symlinks=False)
                    if found := self._items.found(Path(entry), seen):
                        whole.append((seen.st_mtime_ns, *found))
            except Damaged as error:
                discard(self.what, Path(entry), error)
            except OSError as error:
                log.warning("%s: %s is not used: %s", self.what, entry.name, error)
        return tuple((key, size) for _, key, size in sorted(whole, key=lambda each: each[0]))

    def _own(self, user: int, remedy: str = "") -> None:
        """Restrict this tier to files of `user`. Raises OSError if another user owns the
        directory.
        """
        with opened_folder(self.folder) as folder:
            if os.fstat(folder).st_uid != user:
                why = f"{self.folder.name} in it belongs to another user{remedy}"
                raise OSError(errno.EPERM, why)
        self._user = user

    def close(self) -> None:
        """Release the lock of the directory."""
        if self._lock is not None:
            os.close(self._lock)

    def name(self, key: K) -> str:
        return self._items.file(key)

    def path(self, key: K) -> Path:
        """Return the path of an item's file."""
        return self.folder / self._items.file(key)

    def has(self, key: K) -> bool:
        return self.path(key).exists()

    def put(self, key: K, rows: torch.Tensor, ready: Ready) -> None:
        """Write an item once it is `ready`, and release its memory. Raises OSError."""
        try:
            if ready is not None:
                ready.synchronize()
            self._write(key, rows)
        finally:
            self._memory.give_rows(rows)

    def _write(self, key: K, rows: torch.Tensor) -> None:
        values = values_of(rows)
        metadata = self._items.metadata(key) | {"blake3": self._items.checksum(key, values)}
        header = write_header(rows, metadata)
        with self._draft(self.path(key), len(header) + len(values)) as file:
            file.write(header)
            file.write(values)
            file.flush()
            if self._items.durable:
                os.fsync(file.fileno())

    @contextmanager
    def _draft(self, path: Path, _nbytes: int) -> Iterator[BinaryIO]:
        """Open a temporary file for writing, which is renamed to `path` if the context succeeds.
        Raises OSError.
        """
        draft = path.with_suffix(f".{os.getpid()}.tmp").name
        with opened_folder(self.folder) as folder:
            try:
                handle = os.open(draft, PRIVATE, 0o600, dir_fd=folder)
                with os.fdopen(handle, "wb") as file:
                    yield file
                os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise

    def get(self, key: K, size: int) -> tuple[torch.Tensor, Ready]:
        """Read an item. Raises Damaged, after removing the file, and OSError."""
        path = self.path(key)
        try:
            with open_whole(path) as file:
                return self._read(file, key, size), None
        except Damaged as error:
            discard(self.what, path, error)
            raise

    def _read(self, file: BufferedReader, key: K, size: int) -> torch.Tensor:
        if self._user not in (None, os.fstat(file.fileno()).st_uid):
            raise OSError(errno.EPERM, "the file belongs to another user")
        header = read_header(file)
        found, its_size = self._items.check(header, self.name(key))
        if its_size != size:
            raise Damaged(f"its size is {its_size}, not {size}")
        self._trusted(file)
        rows = self._memory.lend(size)
        if rows is None:
            rows = self._items.empty(size)
        try:
            values = values_of(rows)
            # The lengths reveal a file that was truncated after its header had been read.
            if found != key or file.readinto(values) != len(values) or file.read(1):
                raise Damaged("its size is wrong, or it holds another item")
            if self._items.checksum(key, values) != header.checksum:
                raise Damaged("its checksum is wrong")
            if rows.is_floating_point() and not bool(rows.isfinite().all()):
                raise Damaged("it contains NaN or infinity")
        except (Damaged, OSError):
            self._memory.give_rows(rows)
            raise
        return rows

    def _trusted(self, file: BufferedReader) -> None:
        """Do nothing. Subclasses override this hook, which is called when the header of a file is
        valid.
        """

    def drop(self, key: K) -> None:
        self.path(key).unlink(missing_ok=True)


STORE = Folder


def locked(path: Path) -> int:
    """Lock a file, and return its descriptor. Closing the descriptor releases the lock.

    Blocks for up to `LOCK_SECONDS`, because a killed server may need a moment to exit. Raises
    OSError if another server still holds the lock.
    """
    handle, until = made_beside(str(path), os.O_RDWR), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                raise OSError(
                    errno.EBUSY,
                    "another server of this model uses it: use a separate directory for each",
                ) from None
            time.sleep(LOCK_SECONDS / 50)
