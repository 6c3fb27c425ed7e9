"""What this machine made once and keeps on disk: machine code, and what start-up measured, each
under the words that it follows from.

Owns the folder, which stays below a bound, and a file of locks beside it. A file begins with a
digest over its words and content, so that one that is torn, or somebody else's, reads as absent.
Whatever the disk refuses is made again by the next process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = "code"
MOST_BYTES = 64 << 20
"""Past this the files that were used longest ago go. A model's take less than a megabyte."""
DIGEST_BYTES = 32
LOCKS = "making"
"""A file beside the folder. Who makes a file locks one byte there, numbered by the file's name."""
LONGEST_SECONDS = 30.0
"""A kernel takes a second or two. What takes longer is a process that was stopped."""
POLL_SECONDS = 0.01
LOCK_DIGITS = 15
"""Of a name: as many as a position in a file has room for."""


@dataclass(slots=True)
class Tally:
    """What this process has made, and what it has found. Names of files."""

    made: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


TALLY = Tally()


def kept(words: str, make: Callable[[], bytes]) -> bytes:
    """Return what was made from `words` before, or make it now and keep it."""
    content = look(words)
    if content is not None:
        return content
    with _alone(name_of(words)):
        content = look(words)  # another process may have made it meanwhile
        if content is None:
            content = make()
            keep(words, content)
    return content


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait for another process that makes the file with this name, and let none begin.

    The lock ends with its process. Where there is none, or one is held for `LONGEST_SECONDS`, both
    make the file.
    """
    folder, place = code_folder(FOLDER), int(name[:LOCK_DIGITS], 16)
    file = None if folder is None else _locks(folder.with_name(LOCKS))
    if file is None:
        yield
        return
    end = time.monotonic() + LONGEST_SECONDS
    while not _lock(file, place) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


@cache
def _locks(path: Path) -> int | None:
    """Open the file, once a process: closing it would end all locks of the process."""
    try:
        return os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    except OSError:
        return None


def _lock(file: int, place: int) -> bool:
    """Return False while another process has the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no locks here
        return True
    return True


def look(words: str) -> bytes | None:
    """Return what is kept under `words`, or `None`."""
    folder, name = code_folder(FOLDER), name_of(words)
    if folder is None or (content := _read(folder / name)) is None:
        return None
    TALLY.found.append(name)
    with suppress(OSError):
        os.utime(folder / name)
    return content


def keep(words: str, content: bytes) -> None:
    """Keep `content` under `words`, if there is a place."""
    name = name_of(words)
    TALLY.made.append(name)
    folder = code_folder(FOLDER)
    if folder is None:
        return
    with suppress(OSError):
        # A file that is left behind counts, and goes when it is the oldest.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            apart = Path(file.name)
            try:
                file.write(_digest(name, content) + content)
                file.flush()
                apart.replace(folder / name)
            except OSError:
                apart.unlink()
                raise
    with suppress(OSError):
        _bound(folder)


def there(name: str) -> bool:
    """Return True if the file with this name can be read whole."""
    folder = code_folder(FOLDER)
    return folder is not None and _read(folder / name) is not None


def name_of(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, content = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    return content if digest == _digest(path.name, content) else None


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def _bound(folder: Path) -> None:
    """Remove what was used longest ago until all is within the bound."""
    found = sorted(((entry.stat(), entry.path) for entry in os.scandir(folder)), key=_used)
    total = sum(stat.st_size for stat, _ in found)
    for stat, path in found:
        if total <= MOST_BYTES:
            return
        with suppress(OSError):  # a folder where another process writes
            Path(path).unlink()
            total -= stat.st_size


def _used(entry: tuple[os.stat_result, str]) -> int:
    return entry[0].st_mtime_ns


def code_folder(name: str) -> Path | None:
    """Return the folder `name` for this user's code, made if need be.

    Returns `None` if the folder cannot be kept, or others could put their code there.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "saccade" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # a user without a home, too
        return None
    safe = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if safe and os.access(folder, os.W_OK) else None
