"""A cache on disk for compiled code and the results of start-up measurements. The key of a file is
a string (`words`) that identifies everything its content depends on.

The least recently used files are removed to limit the size of the directory. A file begins with a
digest of its name and content, so an incomplete or foreign file counts as missing. If the disk
cannot be written, each process creates the content again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache

from saccade.core.private_folder import PrivateFolder, cache_folder, private_folder

FOLDER = "code"
NAME = re.compile("[0-9a-f]{64}")
MAX_BYTES = 64 << 20
"""Maximum total size of the files in bytes. The files for a model take less than a megabyte."""
DIGEST_BYTES = 32
LOCK_FILE = "making"
"""Name of the lock file. To create a file, a process locks one byte of the lock file, at an offset
derived from the created file's name.
"""
MAX_SECONDS = 30.0
"""Maximum seconds to wait for another process. A kernel compiles in a second or two, so a process
that takes longer was probably stopped.
"""
POLL_SECONDS = 0.01
LOCK_DIGITS = 15
"""Number of hexadecimal digits in a file's name that form the offset of its lock. An offset has 63
bits.
"""


@dataclass(slots=True)
class UsedFiles:
    """Names of the files that this process has created (`made`), and of those that existed
    (`found`).
    """

    made: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


USED_FILES = UsedFiles()


def get_or_create(words: str, make: Callable[[], bytes]) -> bytes:
    """Return the content that is cached under the key `words`, or call `make` and cache its
    result.
    """
    content = load(words)
    if content is not None:
        return content
    with _exclusive(file_name(words)):
        content = load(words)  # another process may have created it in the meantime
        if content is None:
            content = make()
            store(words, content)
    return content


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """Lock a file's name, so that one process at a time creates the file.

    A lock is released when its process exits. If the file system has no locks, or another process
    holds the lock for `MAX_SECONDS`, this process continues without it.
    """
    file, place = _locks(os.environ.get("XDG_CACHE_HOME")), int(name[:LOCK_DIGITS], 16)
    if file is None:
        yield
        return
    end = time.monotonic() + MAX_SECONDS
    while not _lock(file, place) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


@cache
def _locks(_root: str | None) -> int | None:
    """Open the lock file once per process, since closing it would release all of its locks.

    Returns `None` if it cannot be opened. _root: the environment variable that determines the
    directory, as a key for the cache.
    """
    try:
        with _folder() as folder:
            return folder.open(LOCK_FILE, os.O_CREAT | os.O_WRONLY)
    except OSError:
        return None


def _lock(file: int, place: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def load(words: str) -> bytes | None:
    """Return the content that is cached under the key `words`, or `None`."""
    name = file_name(words)
    with suppress(OSError), _folder() as folder:
        content = _read(folder, name)
        if content is not None:
            USED_FILES.found.append(name)
            folder.touch(name)
        return content
    return None


def store(words: str, content: bytes) -> None:
    """Cache `content` under the key `words`, if the directory can be written."""
    name = file_name(words)
    USED_FILES.made.append(name)
    with suppress(OSError), _folder() as folder:
        try:
            folder.write(name, _digest(name, content) + content)
        finally:
            _evict(folder)


def is_writable() -> bool:
    """Return True if the directory can be written."""
    with suppress(OSError), _folder() as folder:
        return folder.writable()
    return False


def is_cached(name: str) -> bool:
    """Return True if the file with this name exists and matches its digest."""
    with suppress(OSError), _folder() as folder:
        return _read(folder, name) is not None
    return False


@contextmanager
def _folder() -> Iterator[PrivateFolder]:
    with private_folder(cache_folder(FOLDER)) as folder:
        yield folder


def file_name(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def _read(folder: PrivateFolder, name: str) -> bytes | None:
    whole = folder.read(name)
    digest, content = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    return content if digest == _digest(name, content) else None


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def _evict(folder: PrivateFolder) -> None:
    """Remove the least recently used files until the rest take at most `MAX_BYTES`.

    Removes only files with the names of cached content.
    """
    found = [entry for entry in folder.entries() if NAME.fullmatch(entry[0])]
    total = sum(stat.st_size for _, stat in found)
    for name, stat in sorted(found, key=lambda entry: entry[1].st_mtime_ns):
        if total <= MAX_BYTES:
            return
        with suppress(OSError):  # another process may have removed the file
            folder.remove(name)
            total -= stat.st_size
