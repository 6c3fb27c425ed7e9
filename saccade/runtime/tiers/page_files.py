"""KV pages, and sequences' states, as files in one folder, a safetensors file each, by their names
(`cache/page_names.py`).

A file is trusted only if everything fits: its name, the writer's identity, size, and the checksum
of bytes. Its owner must fit, too, since whoever else can write here can make all of these fit. A
file appears under its name only when whole (write, rename), and is not forced to the disk. The
checksum finds pages torn by a power failure, which are computed again. The folder, below a root
marked as ours, belongs to one server while locked. Writing through a link in its place is refused.
Knows nothing of threads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import torch
from blake3 import blake3

from saccade.core.claims import made_beside, opened_folder
from saccade.core.page_store import (
    FORMAT,
    PAGE_DRAFT,
    PAGE_FILE,
    PAGES,
    identity_folder,
    page_file,
    page_folders,
)
from saccade.runtime.tiers.files import (
    LARGEST_HEADER,
    TENSOR,
    Damaged,
    Lend,
    open_whole,
    values_of,
    write_header,
)

LOCK_SECONDS = 5.0
PRIVATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


class PageFiles:
    """One identity's pages, in `root`/<identity>."""

    what = "KV cache on disk"
    shared = False

    def __init__(self, root: Path, identity: bytes) -> None:
        """Take, create and lock the folder.

        Raises OSError, with the reason, for a folder that cannot be had, is somebody else's, or is
        in use by another server.
        """
        self._user = PAGES.take(root)
        self.folder = root / identity_folder(identity)
        self._identity = identity.hex()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with opened_folder(self.folder) as folder:
            if os.fstat(folder).st_uid != self._user:
                raise OSError(
                    errno.EPERM,
                    f"{self.folder.name} in it belongs to another user, who can make pages that "
                    "this server would read: remove it, or name another folder",
                )
        self._lock = _locked(self.folder / "lock")

    def close(self) -> None:
        """Leave the folder to other servers."""
        os.close(self._lock)

    def path(self, key: bytes) -> Path:
        return self.folder / page_file(key)

    def store(self, path: Path, key: bytes, rows: torch.Tensor) -> None:
        """Write a page. rows: uint8 [1, bytes] on the CPU. Raises OSError."""
        values = values_of(rows)
        metadata = {"format": FORMAT, "identity": self._identity, "name": key.hex()}
        header = write_header(rows, metadata | {"blake3": _checksum(key, values)})
        draft = path.with_suffix(f".{os.getpid()}.tmp").name
        with opened_folder(self.folder) as folder:
            try:
                handle = os.open(draft, PRIVATE, 0o600, dir_fd=folder)
                with os.fdopen(handle, "wb", buffering=0) as file:
                    file.write(header)
                    file.write(values)
                os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise

    def load(
        self,
        path: Path,
        key: bytes,
        lend: Lend,  # noqa: ARG002 - pages have no lent memory yet
        give: Callable[[torch.Tensor], None],  # noqa: ARG002
        size: int | None,
    ) -> torch.Tensor:
        """Read a page, uint8 [1, size].

        Raises Damaged, and OSError where the file cannot be read.
        """
        assert size is not None, "who asks for a page knows its size"
        with open_whole(path) as file:
            if os.fstat(file.fileno()).st_uid != self._user:
                raise OSError(errno.EPERM, "it belongs to another user")
            checksum = self._header(file, key, size)
            rows = torch.empty((1, size), dtype=torch.uint8)
            values = values_of(rows)
            if file.readinto(values) != size or file.read(1):
                raise Damaged("its size is wrong")
        if _checksum(key, values) != checksum:
            raise Damaged("its checksum is wrong")
        return rows

    def scan(self) -> tuple[tuple[bytes, int], ...]:
        """Return (name, bytes on disk) for the files, the oldest first.

        Removes files half written by a dead server.
        """
        found: list[tuple[int, bytes, int]] = []
        for entry in os.scandir(self.folder):
            if PAGE_DRAFT.fullmatch(entry.name):
                with suppress(OSError):
                    Path(entry).unlink()
            elif PAGE_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                found.append((seen.st_mtime_ns, bytes.fromhex(entry.name[:64]), seen.st_size))
        return tuple((name, nbytes) for _, name, nbytes in sorted(found))

    def _header(self, file: BufferedReader, key: bytes, size: int) -> str:
        """Return the checksum. Raises Damaged where anything does not fit."""
        text = file.read(min(int.from_bytes(file.read(8), "little"), LARGEST_HEADER))
        try:
            told = json.loads(text)
            metadata, shape = told["__metadata__"], told[TENSOR]["shape"]
            checksum, name = str(metadata["blake3"]), metadata["name"]
            identity = metadata["format"], metadata["identity"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Damaged("its header makes no sense") from None
        if identity != (FORMAT, self._identity):
            raise Damaged("it is of another model or format")
        if name != key.hex():
            raise Damaged("it holds another page")
        if shape != [1, size] or os.fstat(file.fileno()).st_size != 8 + len(text) + size:
            raise Damaged("its size is wrong")
        return checksum


def _locked(path: Path) -> int:
    """Lock a file until closed, and return its descriptor. A killed server may take a moment to go.

    Raises OSError if another server keeps the lock.
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
                    "another server of this model uses it: give each a folder of its own",
                ) from None
            time.sleep(LOCK_SECONDS / 50)


def remove_others(root: Path, identity: bytes) -> int:
    """Remove other identities' pages, unless a running server has the lock. Returns their number.

    Models served earlier keep nothing next to the present model.
    """
    count = 0
    for folder in page_folders(root):
        if folder.name == identity_folder(identity):
            continue
        with suppress(OSError), open(folder / "lock", "r+b", opener=made_beside) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in os.scandir(folder):
                if PAGE_FILE.fullmatch(entry.name) or PAGE_DRAFT.fullmatch(entry.name):
                    Path(entry).unlink()
                    count += 1
    return count


def _checksum(key: bytes, values: memoryview) -> str:
    """Return a checksum of the values, under their name. Another page's values never fit."""
    return blake3(values, key=key).hexdigest()
