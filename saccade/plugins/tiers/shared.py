"""The shared store: a directory of embeddings that several servers write, within one budget.

    ROOT / .saccade-embeddings     marks the directory as Saccade's (`core/claims.py`)
    ROOT / lock                    must be held to evict files; contains the number of bytes in use
    ROOT / FINGERPRINT / NAME      a complete embedding of one model, which never changes
    ROOT / FINGERPRINT / .X.draft  a file being written, locked by its writer

Only files with these names (`core/store.py`) that belong to this server's user are listed, counted
and removed. All other entries are ignored, and symbolic links and pipes are not opened.

Space is reserved under the lock before a byte is written, so the budget is never exceeded. Locks
are the kernel's (flock). The kernel releases the locks of a server as soon as it exits, so no lock
is ever stale. The unlocked drafts of an exited server are removed by the next eviction. After a
crash, the count in the lock file may be too high, but never too low; the next eviction recounts.
Eviction is LRU across all models. A server opens only the files that it needs. The first server
that computes an embedding writes it, and each read counts as a use.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch

from saccade.core.claims import beside, made_beside, opened_folder
from saccade.core.store import (
    DRAFT,
    DRAFT_NAME,
    EMBEDDING_FILES,
    SHARED,
    on_disk,
    taken,
)
from saccade.plugins.tiers.disk import Folder
from saccade.plugins.tiers.items import Items, Memory

log = logging.getLogger("saccade")

LOCK_SECONDS = 0.5
"""Seconds to wait while another server holds the lock. After that, the item is not saved."""
LOCK_PAUSE = 0.005
SPARE = 16
"""An eviction frees an additional 1 / SPARE of the budget, because each eviction has to list every
file.
"""

K = TypeVar("K", bound=Hashable)


class SharedFolder(Folder[K]):
    """Stores items of one type in a directory that several servers read and write."""

    def __init__(self, root: Path, items: Items[K], memory: Memory, nbytes: int) -> None:
        """Open or create the directory. Raises OSError with the reason.

        nbytes: the total budget of all servers that write below `root`.
        """
        self._room = SharedBudget(root, nbytes)
        super().__init__(root, items, memory, nbytes)
        self.shared = str(self.folder)

    def _begin(self, user: int) -> tuple[tuple[K, int], ...]:
        self._own(user)
        return ()

    def _write(self, key: K, rows: torch.Tensor) -> None:
        if not self.has(key):  # another server may have written it already
            super()._write(key, rows)

    @contextmanager
    def _draft(self, path: Path, _nbytes: int) -> Iterator[BinaryIO]:
        with self._room.draft(path, _nbytes) as file:
            yield file

    def _trusted(self, file: BufferedReader) -> None:
        os.utime(file.fileno())


STORE = SharedFolder


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    used: int
    nbytes: int
    folder: Path
    name: str


class SharedBudget:
    """Keeps the files below `root` within `budget` bytes, counted in whole disk blocks.

    Methods block. Call them from one thread per server.
    """

    def __init__(self, root: Path, budget: int) -> None:
        """Open the directory, and count the bytes of its files.

        Raises OSError if the directory cannot be opened or belongs to another user.
        """
        self._root = root
        self._budget = budget
        self.evictions = 0
        self.user = SHARED.claim_folder(root)
        with self._locked() as lock:
            self._write(lock, self._sweep(0))

    @contextmanager
    def draft(self, target: Path, nbytes: int) -> Iterator[BinaryIO]:
        """Reserve `nbytes` and open a new file to write, which is renamed to `target` on success.

        Raises OSError if the file exceeds the budget, or another server holds the lock.
        """
        needed = on_disk(nbytes)
        if needed > self._budget:
            raise OSError(errno.ENOSPC, "the file is larger than the directory's size limit")
        path = target.parent / f".{secrets.token_hex(8)}{DRAFT}"
        with self._locked() as lock:
            used = self._read(lock)
            if used is None or used + needed > self._budget:
                used = self._sweep(needed)
            if used + needed > self._budget:
                raise OSError(errno.ENOSPC, "other servers are writing, and the directory is full")
            self._write(lock, used + needed)
            file = open(path, "xb", opener=beside)  # noqa: SIM115 - closed below
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(nbytes)  # so that other servers count its full size meanwhile
        try:
            yield file
            with self._locked():  # so that another server counts it once, under one of its names
                path.replace(target)
        finally:
            path.unlink(missing_ok=True)
            file.close()

    # ---- space

    def _sweep(self, needed: int) -> int:
        """Recount the bytes in use, remove abandoned drafts, and evict files if `needed` more bytes
        exceed the budget.

        Returns the bytes in use.
        """
        files: list[_Found] = []
        used = 0
        for folder, handle in EMBEDDING_FILES.folders(self._root):
            for file in os.scandir(handle):
                with suppress(OSError):  # another server may have removed it meanwhile
                    found = file.stat(follow_symlinks=False)
                    if not stat.S_ISREG(found.st_mode) or found.st_uid != self.user:
                        continue
                    if EMBEDDING_FILES.file.fullmatch(file.name):
                        files.append(_Found(found.st_mtime_ns, taken(found), folder, file.name))
                        used += taken(found)
                    elif DRAFT_NAME.fullmatch(file.name) and not _abandoned(
                        folder / file.name, handle
                    ):
                        used += on_disk(found.st_size)
        if used + needed > self._budget:
            enough = self._budget - needed - self._budget // SPARE
            used = self._make_room(files, used, enough)
        return used

    def _make_room(self, files: list[_Found], used: int, enough: int) -> int:
        """Evict the least recently used files until at most `enough` bytes are in use.

        Returns the bytes in use.
        """
        for file in sorted(files):
            if used <= enough:
                break
            with suppress(FileNotFoundError), opened_folder(file.folder) as handle:
                os.unlink(file.name, dir_fd=handle)
                self.evictions += 1
            used -= file.nbytes
        return used

    def _read(self, lock: BinaryIO) -> int | None:
        """Return the bytes in use that the lock file states, or `None` if it contains no valid
        number.
        """
        lock.seek(0)
        text = lock.read(32)
        return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None

    def _write(self, lock: BinaryIO, used: int) -> None:
        lock.seek(0)
        lock.write(b"%020d\n" % used)
        lock.flush()

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Lock the directory against all other servers. Raises OSError if another server holds the
        lock for too long.
        """
        with open(self._root / "lock", "r+b", opener=made_beside) as lock:
            until = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        why = "another server held the lock for too long"
                        raise OSError(errno.EAGAIN, why) from None
                time.sleep(LOCK_PAUSE)
            yield lock


def _abandoned(path: Path, folder: int) -> bool:
    """Remove a draft if its writer has exited. Returns False if the writer is still running.

    folder: the descriptor of the draft's directory.

    Raises OSError.
    """
    with open(path, "rb", opener=beside) as draft:
        try:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.unlink(path.name, dir_fd=folder)
    log.info("shared embeddings: removing %s, which is incomplete", path.name)
    return True
