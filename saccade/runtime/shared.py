"""A folder of embeddings that several servers write, within one budget.

    ROOT / lock                    whoever has locked it may make room; it says what is in use
    ROOT / FINGERPRINT / NAME      an embedding of one model, whole: it never changes
    ROOT / FINGERPRINT / .X.draft  one that is being written, locked by its writer

Room is taken before a byte is written, under the lock, so that the budget holds at every moment.
Locks are the kernel's (flock): those of a server that dies are free at once, so nothing ever grows
stale. What it had begun is found unlocked, and removed, by whoever makes room next. The count in
the lock file may be too high after a death, never too low; making room counts anew. Those used
least lately go first, of all models. Knows nothing of what files hold.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from saccade.core.config import DISK_BLOCK
from saccade.core.store import SUFFIX

log = logging.getLogger("saccade")

DRAFT = ".draft"
LOCK_SECONDS = 0.5
"""Another server may make room for so long before this one gives up a save."""
LOCK_PAUSE = 0.005
SPARE = 16
"""Making room frees a part in so many of the budget beyond what is needed: it looks at every file.
"""


class SharedRoom:
    """At most `budget` bytes of files below `root`, blocks counted whole. Methods block; one thread
    per server calls them.
    """

    def __init__(self, root: Path, budget: int) -> None:
        """Raises OSError where the folder cannot be had."""
        self._root = root
        self._budget = budget
        self.evictions = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as lock:
            self._write(lock, self._sweep(0))

    @contextmanager
    def draft(self, target: Path, nbytes: int) -> Iterator[BinaryIO]:
        """A new file, for which there is room, open to be written; at the end it is `target`.

        Raises OSError: there is no room at all, or another server holds the lock.
        """
        taken = on_disk(nbytes)
        if taken > self._budget:
            raise OSError(errno.ENOSPC, "it is larger than the budget")
        path = target.parent / f".{secrets.token_hex(8)}{DRAFT}"
        with self._locked() as lock:
            used = self._read(lock)
            if used is None or used + taken > self._budget:
                used = self._sweep(taken)
            if used + taken > self._budget:
                raise OSError(errno.ENOSPC, "others are writing all that there is room for")
            self._write(lock, used + taken)
            file = open(path, "xb", opener=_private)  # noqa: SIM115 - closed below
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
        """Bytes in use once `needed` more fit, and some to spare; all that nobody writes any more
        is removed.
        """
        files: list[tuple[int, int, Path]] = []
        used = 0
        for path in self._root.glob("*/*"):
            with suppress(OSError):  # its writer, or who found it damaged, may have removed it
                found = path.lstat()
                if path.suffix == SUFFIX:
                    files.append((found.st_mtime_ns, on_disk(found.st_size), path))
                    used += on_disk(found.st_size)
                elif path.suffix == DRAFT and not _abandoned(path):
                    used += on_disk(found.st_size)
        if used + needed > self._budget:
            for _, nbytes, path in sorted(files):
                if used + needed + self._budget // SPARE <= self._budget:
                    break
                with suppress(FileNotFoundError):
                    path.unlink()
                    self.evictions += 1
                used -= nbytes
        return used

    def _read(self, lock: BinaryIO) -> int | None:
        """What is in use, if the lock file tells."""
        lock.seek(0)
        told = lock.read(32)
        return int(told) if told.endswith(b"\n") and told[:-1].isdigit() else None

    def _write(self, lock: BinaryIO, used: int) -> None:
        lock.seek(0)
        lock.write(b"%020d\n" % used)
        lock.flush()

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """One server at a time. Raises OSError when another keeps the lock."""
        with open(self._root / "lock", "r+b", opener=_made) as lock:
            until = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        told = "another server has held the lock for too long"
                        raise OSError(errno.EAGAIN, told) from None
                time.sleep(LOCK_PAUSE)
            yield lock


def on_disk(nbytes: int) -> int:
    """What a file takes of a disk."""
    return max(1, -(-nbytes // DISK_BLOCK)) * DISK_BLOCK


def _abandoned(path: Path) -> bool:
    """Remove a draft whose writer has died. Raises OSError."""
    with path.open("rb") as draft:
        try:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    log.info("shared embeddings: %s was left half written, and is removed", path.name)
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _made(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)
