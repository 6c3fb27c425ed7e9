"""The shared store: a folder of embeddings that several servers write, within one budget.

    ROOT / .saccade-embeddings     the marker: this folder is ours (`core/claims.py`)
    ROOT / lock                    its holder may evict; has the bytes in use
    ROOT / FINGERPRINT / NAME      an embedding of one model, whole: never changed
    ROOT / FINGERPRINT / .X.draft  a file being written, locked by its writer

Files of exactly these names (`core/store.py`) of this server's user are looked at, counted and
removed; all other entries are ignored, and no link or pipe is followed.

Room is taken before a byte is written, under the lock, so that the budget holds at every moment.
Locks are the kernel's (flock): those of an exited server are free at once, so locks are never
stale. Its drafts are found unlocked, and removed, by the next server to make room. The count in the
lock file may be too high after a death, never too low; making room counts anew. The least lately
used go first, of all models. Each server looks only at needed files, the first one writes a file,
once, and a read counts as a use.
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
"""Another server may make room for so long before this one gives up a save."""
LOCK_PAUSE = 0.005
SPARE = 16
"""Making room frees a part in so many of the budget beyond what is needed: it looks at every file.
"""

K = TypeVar("K", bound=Hashable)


class SharedFolder(Folder[K]):
    """Items of one kind, in a folder where each server finds what any has written."""

    def __init__(self, root: Path, items: Items[K], memory: Memory, nbytes: int) -> None:
        """Take or create the folder. nbytes: the budget of all servers that write below `root`.

        Raises OSError, with the reason.
        """
        self._room = SharedBudget(root, nbytes)
        super().__init__(root, items, memory, nbytes)
        self.shared = str(self.folder)

    def _begin(self, user: int) -> tuple[tuple[K, int], ...]:
        self._own(user)
        return ()

    def _write(self, key: K, rows: torch.Tensor) -> None:
        if not self.has(key):  # another server was first
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
    """An embedding. The least lately used is the smallest."""

    used: int
    nbytes: int
    folder: Path
    name: str


class SharedBudget:
    """At most `budget` bytes in files below `root`, blocks counted whole.

    Methods block. One thread per server calls them.
    """

    def __init__(self, root: Path, budget: int) -> None:
        """Take the folder and count what it holds.

        Raises OSError where the folder cannot be had, or is somebody else's.
        """
        self._root = root
        self._budget = budget
        self.evictions = 0
        self.user = SHARED.claim_folder(root)
        with self._locked() as lock:
            self._write(lock, self._sweep(0))

    @contextmanager
    def draft(self, target: Path, nbytes: int) -> Iterator[BinaryIO]:
        """Reserve `nbytes` and open a new file to be written, which becomes `target` at the end.

        Raises OSError if it exceeds the budget, or another server holds the lock.
        """
        needed = on_disk(nbytes)
        if needed > self._budget:
            raise OSError(errno.ENOSPC, "it is larger than the budget")
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
            file.truncate(nbytes)  # whoever counts meanwhile counts all of it
        try:
            yield file
            with self._locked():  # who counts finds it under one name
                path.replace(target)
        finally:
            path.unlink(missing_ok=True)
            file.close()

    # ---- room

    def _sweep(self, needed: int) -> int:
        """Make `needed` bytes and some to spare fit the budget. Returns the bytes in use.

        Removes abandoned drafts.
        """
        files: list[_Found] = []
        used = 0
        for folder, handle in EMBEDDING_FILES.folders(self._root):
            for file in os.scandir(handle):
                with suppress(OSError):  # its writer, or who found it damaged, may have removed it
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
        """Remove the least lately used files until at most `enough` bytes are in use, or all are
        gone.

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
        """Return the bytes in use, if the lock file has them."""
        lock.seek(0)
        text = lock.read(32)
        return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None

    def _write(self, lock: BinaryIO, used: int) -> None:
        lock.seek(0)
        lock.write(b"%020d\n" % used)
        lock.flush()

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Hold the lock, which one server has at a time. Raises OSError when another keeps it."""
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
    """Remove a dead writer's draft. Returns False if its writer lives.

    `folder`: the draft's, open. Raises OSError.
    """
    with open(path, "rb", opener=beside) as draft:
        try:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.unlink(path.name, dir_fd=folder)
    log.info("shared embeddings: removing %s, which is incomplete", path.name)
    return True
