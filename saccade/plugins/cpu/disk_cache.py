"""What this machine made once and keeps on disk: machine code, and what start-up measured, each
under the words that it follows from.

Owns the folder, which stays below a bound, and a file of locks in it. A file begins with a
digest over its words and content, so that one that is torn, or somebody else's, reads as absent.
Whatever the disk refuses is made again by the next process.
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
"""Past this the files that were used longest ago go. A model's take less than a megabyte."""
DIGEST_BYTES = 32
LOCK_FILE = "making"
"""A file in the folder. Who makes a file locks one byte there, numbered by the file's name."""
MAX_SECONDS = 30.0
"""A kernel takes a second or two. What takes longer is a process that was stopped."""
POLL_SECONDS = 0.01
LOCK_DIGITS = 15
"""Of a name: as many as a position in a file has room for."""


@dataclass(slots=True)
class UsedFiles:
    """What this process has made, and what it has found. Names of files."""

    made: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


USED_FILES = UsedFiles()


def get_or_create(words: str, make: Callable[[], bytes]) -> bytes:
    """Return what was made from `words` before, or make it now and keep it."""
    content = load(words)
    if content is not None:
        return content
    with _exclusive(file_name(words)):
        content = load(words)  # another process may have made it meanwhile
        if content is None:
            content = make()
            store(words, content)
    return content


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """Wait for another process that makes the file with this name, and let none begin.

    The lock ends with its process. Where there is none, or one is held for `MAX_SECONDS`, both
    make the file.
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
    """Open the file, once a process: closing it would end all locks of the process.

    _root: what the folder follows from.
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
    except OSError:  # no locks here
        return True
    return True


def load(words: str) -> bytes | None:
    """Return what is kept under `words`, or `None`."""
    name = file_name(words)
    with suppress(OSError), _folder() as folder:
        content = _read(folder, name)
        if content is not None:
            USED_FILES.found.append(name)
            folder.touch(name)
        return content
    return None


def store(words: str, content: bytes) -> None:
    """Keep `content` under `words`, if there is a place."""
    name = file_name(words)
    USED_FILES.made.append(name)
    with suppress(OSError), _folder() as folder:
        try:
            folder.write(name, _digest(name, content) + content)
        finally:
            _evict(folder)


def is_writable() -> bool:
    """Return True if files can be kept."""
    with suppress(OSError), _folder() as folder:
        return folder.writable()
    return False


def is_cached(name: str) -> bool:
    """Return True if the file with this name can be read whole."""
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
    """Remove what was used longest ago until all is within the bound.

    Files with other names than ours are left alone.
    """
    found = [entry for entry in folder.entries() if NAME.fullmatch(entry[0])]
    total = sum(stat.st_size for _, stat in found)
    for name, stat in sorted(found, key=lambda entry: entry[1].st_mtime_ns):
        if total <= MAX_BYTES:
            return
        with suppress(OSError):  # a folder where another process writes
            folder.remove(name)
            total -= stat.st_size
