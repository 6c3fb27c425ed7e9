"""Uploaded files: kept once by content, on disk, until they are deleted or expire.

    FOLDER / DIGEST / content          the bytes; DIGEST is their blake3 in hexadecimal
    FOLDER / DIGEST / SUFFIX.json      one upload of them: "file-DIGEST-SUFFIX" is its id
    FOLDER / incoming / ...            what is being written

The disk is the only truth: a restart loads nothing, and several servers may share a folder (writers
take turns by a lock file). Everything is written whole, synced and then renamed into place; what is
read is compared with its digest, and dropped if it does not agree. Every method blocks: call it on
a thread. Knows nothing of HTTP, and of pictures only what `check` tells it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from saccade.core.config import MIB
from saccade.core.errors import NotFound, TooLarge

_ID = re.compile(r"file-([0-9a-f]{64})-([0-9a-f]{8})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stored:
    """One upload.

    `created` is in nanoseconds since the epoch; `expires`, in seconds, is None for a file that
    stays.
    """

    id: str
    name: str
    purpose: str
    nbytes: int
    created: int
    expires: int | None


class FileStore:
    """Files in `folder`, at most `budget` bytes of content together; nothing is touched before the
    first `save`.

    When the budget is used up, uploads are refused rather than old files dropped: a file that was
    accepted is there until its owner deletes it or it expires.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget

    def save(self, data: bytes, name: str, purpose: str, lifetime: int | None) -> Stored:
        """Keep `data`, for `lifetime` seconds if that is given.

        Raises TooLarge when there is no room for it.
        """
        digest, now = blake3(data).hexdigest(), time.time_ns()
        stored = Stored(
            f"file-{digest}-{secrets.token_hex(4)}",
            name,
            purpose,
            len(data),
            now,
            lifetime and now // 10**9 + lifetime,
        )
        with self._locked():
            self._sweep()
            home = self._folder / digest
            if not home.exists():
                self._check_room(len(data))
            home.mkdir(exist_ok=True, mode=0o700)
            # Written even if it is there: a damaged copy would otherwise spoil every later upload
            # of the same bytes.
            self._write(home / "content", data)
            self._write(self._note(stored.id), json.dumps(asdict(stored)).encode())
            _sync(self._folder)
        return stored

    def entries(self) -> list[Stored]:
        """All files, oldest first."""
        found = (self._read_note(note) for note in self._folder.glob("*/*.json"))
        return sorted(
            (stored for stored in found if stored is not None),
            key=lambda stored: (stored.created, stored.id),
        )

    def find(self, id: str) -> Stored:
        """Raises NotFound."""
        stored = self._read_note(self._note(id))
        if stored is None:
            raise NotFound(
                f"there is no file {id!r}; it may have been deleted, or have expired",
                code="file_not_found",
            )
        return stored

    def read(self, id: str) -> bytes:
        """The content, as it was uploaded.

        Raises NotFound, also when the disk has damaged it; it is dropped then.
        """
        self.find(id)
        home = self._note(id).parent
        data = _content(home)
        if data is None:
            with self._locked():
                if _content(home) is None:  # and nobody has uploaded it again meanwhile
                    shutil.rmtree(home, ignore_errors=True)
            raise NotFound(
                f"the content of {id!r} was damaged on disk and has been dropped: upload it again",
                code="file_not_found",
            )
        return data

    def open(self, id: str) -> BinaryIO:
        """The content, whole and undamaged now, to be read in pieces. Raises as `read` does."""
        self.find(id)
        try:
            file = (self._note(id).parent / "content").open("rb")
        except OSError:
            self.read(id)  # says what is wrong with it
            raise
        digest = blake3()
        while piece := file.read(MIB):
            digest.update(piece)
        if digest.hexdigest() != self._note(id).parent.name:
            file.close()
            self.read(id)
            return self.open(id)  # somebody has uploaded it again meanwhile
        file.seek(0)
        return file

    def delete(self, id: str) -> None:
        """Raises NotFound."""
        self.find(id)
        with self._locked():
            self._note(id).unlink(missing_ok=True)
            self._sweep()

    # ---- inside

    def _note(self, id: str) -> Path:
        """Where the note of an upload lies. Raises NotFound for what is no id of ours."""
        parts = _ID.fullmatch(id)
        if parts is None:
            raise NotFound(f"there is no file {id[:200]!r}", code="file_not_found")
        return self._folder / parts[1] / f"{parts[2]}.json"

    def _read_note(self, path: Path) -> Stored | None:
        """The upload a note describes; None when it is not there, has expired, or does not describe
        what lies beside it.
        """
        try:
            stored = Stored(**json.loads(path.read_bytes()))
            whole = (path.parent / "content").stat().st_size == stored.nbytes and self._note(
                stored.id
            ) == path
        except (OSError, ValueError, TypeError, NotFound):
            return None
        return (
            stored if whole and (stored.expires is None or stored.expires > time.time()) else None
        )

    def _sweep(self) -> None:
        """Remove what no upload stands for: expired and damaged notes, content without a note, what
        a crash left half written.
        """
        for home in self._homes():
            notes = list(home.glob("*.json"))
            gone = [note for note in notes if self._read_note(note) is None]
            for note in gone:
                note.unlink()
            if len(gone) == len(notes):
                shutil.rmtree(home, ignore_errors=True)
        for left in (self._folder / "incoming").iterdir():
            left.unlink()

    def _homes(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if _DIGEST.fullmatch(path.name))

    def _check_room(self, nbytes: int) -> None:
        used = sum((home / "content").stat().st_size for home in self._homes())
        if used + nbytes > self._budget:
            raise TooLarge(
                f"the file has {nbytes / MIB:.1f} MiB; of the {self._budget / MIB:.0f} MiB for "
                f"uploaded files {used / MIB:.1f} are in use: "
                "delete some, upload with expires_after, or start the server with a larger "
                "--files-mb",
                "file",
                "file_storage_full",
            )

    def _write(self, path: Path, data: bytes) -> None:
        """Put a whole file in place, or none."""
        new = self._folder / "incoming" / secrets.token_hex(8)
        with open(new, "wb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, in this process and in others."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / "incoming").mkdir(exist_ok=True, mode=0o700)
        with open(self._folder / "lock", "w", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _private(path: str, flags: int) -> int:
    """An opener: what users upload is nobody else's on this machine."""
    return os.open(path, flags, 0o600)


def _content(home: Path) -> bytes | None:
    """What lies in `home`, if it is what its name says."""
    try:
        data = (home / "content").read_bytes()
    except OSError:
        return None
    return data if blake3(data).hexdigest() == home.name else None


def _sync(folder: Path) -> None:
    """Make renames and new entries in `folder` last; some file systems cannot."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        os.fsync(handle)
    os.close(handle)
