"""Embeddings as files in one folder, a safetensors file each.

A file is trusted only if everything fits: its name, format, model fingerprint, shape, and the
checksum of its values. Entries with such a name that do not fit are removed, except folders and
files that could not be looked at: the next run may succeed. All other names are left alone. A file
appears under its name only when whole and on the disk (write, fsync, rename). Files are read, not
mapped: where a file is cut short, or its disk has gone away, a read fails and a mapping kills the
process.

In a folder for several servers (`shared.py`), each looks only at needed files, the first server
writes a file, once, and a read counts as a use. Knows nothing of threads.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import torch
from blake3 import blake3

from saccade.core.claims import Strange, beside, opened_folder
from saccade.core.config import DISK_BLOCK
from saccade.core.store import LONE_DRAFT_NAME, SHARED, WHOLE_NAME, file_name
from saccade.core.types import ImageKey
from saccade.runtime.tiers.shared import SharedBudget

log = logging.getLogger("saccade")

FORMAT = "saccade-embedding-1"
"""Changes whenever what the vision tower is given, or how its answer is kept, changes in a way that
the fingerprint does not show.
"""
TENSOR = "embedding"
LARGEST_HEADER = 1 << 16
SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
}


Lend = Callable[[int], torch.Tensor | None]
"""Memory on the CPU for so many rows of an embedding, or None."""


class Damaged(Exception):
    """The file's content breaks what its name promises."""


@dataclass(frozen=True, slots=True)
class _Header:
    key: ImageKey
    num_tokens: int
    checksum: str


class EmbeddingFiles:
    """One model's embeddings, in `root`/<fingerprint>."""

    def __init__(
        self,
        root: Path,
        fingerprint: bytes,
        width: int,
        dtype: torch.dtype,
        shared_bytes: int | None = None,
    ) -> None:
        """Take or create the folder.

        `shared_bytes`: the budget for all servers that write below `root`. Without it, a single
        server keeps its own budget. Raises OSError for a folder that cannot be had, or is somebody
        else's.
        """
        self.shared_budget = None if shared_bytes is None else SharedBudget(root, shared_bytes)
        if self.shared_budget is None:
            SHARED.take(root)
        self._folder = root / fingerprint.hex()
        self._identity = {"format": FORMAT, "model": fingerprint.hex()}
        self._width = width
        self._dtype = dtype
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with opened_folder(self._folder) as handle:
            user = os.fstat(handle).st_uid
        if self.shared_budget is not None and user != self.shared_budget.user:
            raise OSError(errno.EPERM, f"{self._folder.name} in it belongs to another user")

    what = "embedding cache on disk"

    @property
    def shared(self) -> bool:
        """Return True if other servers write to the folder, too."""
        return self.shared_budget is not None

    def close(self) -> None:
        """Do nothing: each file is closed after use."""

    def path(self, key: ImageKey) -> Path:
        return self._folder / file_name(key)

    @property
    def folder(self) -> Path:
        """The folder with this model's files."""
        return self._folder

    def store(self, path: Path, key: ImageKey, embedding: torch.Tensor) -> None:
        if self.shared_budget is not None and path.exists():
            return  # another server was first
        metadata = self._identity | {
            "digest": key.digest.hex(),
            "settings": key.settings.hex(),
            "salt": key.salt,
        }
        values = values_of(embedding)
        header = write_header(embedding, metadata | {"blake3": blake3(values).hexdigest()})
        with self._draft(path, len(header) + len(values)) as file:
            file.write(header)
            file.write(values)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _draft(self, path: Path, nbytes: int) -> Iterator[BinaryIO]:
        """Open a file to be written, which becomes `path` at the end. Raises OSError."""
        if self.shared_budget is not None:
            with self.shared_budget.draft(path, nbytes) as file:
                yield file
            return
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.touch(mode=0o600)
            with draft.open("wb") as file:
                yield file
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def load(
        self,
        path: Path,
        key: ImageKey,
        lend: Lend,
        give: Callable[[torch.Tensor], None],
        num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Read an embedding. `num_tokens`: the image's number.

        Raises Damaged, and OSError for an unreadable file.
        """
        with open_whole(path) as file:
            self._check_user(file)
            header = self._header(file, path)
            if num_tokens not in (None, header.num_tokens):
                raise Damaged(f"it has {header.num_tokens} tokens, not {num_tokens}")
            if self.shared_budget is not None:
                os.utime(file.fileno())
            rows = lend(header.num_tokens)
            if rows is None:
                rows = torch.empty((header.num_tokens, self._width), dtype=self._dtype)
            try:
                values = values_of(rows)
                if header.key != key:
                    raise Damaged("it holds another image")
                # Whoever shortens the file meanwhile does not go unseen.
                if file.readinto(values) != len(values) or file.read(1):
                    raise Damaged("its size is wrong")
                if blake3(values).hexdigest() != header.checksum:
                    raise Damaged("its checksum is wrong")
                if not bool(rows.isfinite().all()):
                    raise Damaged("it has values that are no numbers")
            except (Damaged, OSError):
                give(rows)
                raise
        return rows

    def scan(self) -> tuple[tuple[ImageKey, int], ...]:
        """Return the files that are whole by name, header and size, the oldest first.

        A shared folder is left unscanned.
        """
        if self.shared_budget is not None:
            return ()
        found: list[tuple[int, ImageKey, int]] = []
        for path in self._folder.iterdir():
            try:
                if LONE_DRAFT_NAME.fullmatch(path.name):
                    raise Damaged("it was left half written")
                if not WHOLE_NAME.fullmatch(path.name):
                    continue
                with open_whole(path) as file:
                    header = self._header(file, path)
                    found.append(
                        (os.fstat(file.fileno()).st_mtime_ns, header.key, header.num_tokens)
                    )
            except Damaged as error:
                discard(self.what, path, error)
            except OSError as error:
                log.warning("embedding cache on disk: %s is not used: %s", path.name, error)
        return tuple(
            (key, num_tokens) for _, key, num_tokens in sorted(found, key=lambda each: each[0])
        )

    def _check_user(self, file: BufferedReader) -> None:
        """Raise OSError for another user's file in a shared folder."""
        if (
            self.shared_budget is not None
            and os.fstat(file.fileno()).st_uid != self.shared_budget.user
        ):
            raise OSError(errno.EPERM, "it belongs to another user")

    def _header(self, file: BufferedReader, path: Path) -> _Header:
        """Read up to the values. Raises Damaged if anything does not fit."""
        size = os.fstat(file.fileno()).st_size
        text = file.read(min(int.from_bytes(file.read(8), "little"), LARGEST_HEADER))
        try:
            told = json.loads(text)
            metadata, shape = told["__metadata__"], told[TENSOR]["shape"]
            key = ImageKey(
                bytes.fromhex(metadata["digest"]),
                bytes.fromhex(metadata["settings"]),
                metadata["salt"],
            )
            checksum = metadata["blake3"]
            named = self.path(key)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Damaged("its header makes no sense") from None
        if named != path:
            raise Damaged("its name is another image's")
        if any(metadata.get(name) != value for name, value in self._identity.items()):
            raise Damaged("it is of another model or format")
        row = self._width * self._dtype.itemsize
        num_tokens, rest = divmod(size - 8 - len(text), row)
        if rest or num_tokens < 1 or shape != [num_tokens, self._width]:
            raise Damaged("its size is wrong")
        return _Header(key, num_tokens, checksum)


def open_whole(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises Damaged for all else."""
    try:
        return open(path, "rb", opener=beside)
    except Strange:
        raise Damaged("it is not a regular file") from None


def discard(what: str, path: Path, why: Damaged) -> None:
    """Remove a file untrue to its name, if possible.

    Folders stay, and everything stays where writing is forbidden.
    """
    try:
        path.unlink()
    except OSError as error:
        log.warning(
            "%s: %s is not used (%s), and cannot be removed: %s",
            what,
            path.name,
            why,
            error,
        )
    else:
        log.warning("%s: %s is removed: %s", what, path.name, why)


def write_header(rows: torch.Tensor, metadata: dict[str, str]) -> bytes:
    """Return the beginning of a safetensors file with one tensor, up to its values."""
    dtype = SAFETENSORS_NAMES[rows.dtype]
    tensor = {"dtype": dtype, "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}
    text = json.dumps({"__metadata__": metadata, TENSOR: tensor}).encode()
    text += b" " * (-(8 + len(text)) % DISK_BLOCK)  # whole blocks, as the budget counts them
    return len(text).to_bytes(8, "little") + text


def values_of(rows: torch.Tensor) -> memoryview:
    """View the values of contiguous rows on the CPU, without a copy."""
    return rows.view(torch.uint8).numpy().reshape(-1).data
