"""Reads and writes the files of cached items: their names, headers and checksums, and the tensors
that they contain. Only this differs between embeddings and KV pages.

A file is used only if its name, format, identity (the model's fingerprint, or the pages' identity),
shape and checksum match. Files are read, not mapped. If a file is truncated or its disk is removed,
a read raises, but access to a mapping kills the process.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Hashable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from blake3 import blake3

from saccade.cache.content import PAGE_FORMAT
from saccade.core import store
from saccade.core.claims import Strange, beside
from saccade.core.config import DISK_BLOCK
from saccade.core.store import FolderLayout
from saccade.core.types import ImageKey
from saccade.runtime.vision.fingerprint import FORMAT

log = logging.getLogger("saccade")

TENSOR = "embedding"
MAX_HEADER = 1 << 16
SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
}
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions from parsing a header that another program has written."""


K = TypeVar("K", bound=Hashable)


class Damaged(Exception):
    """Raised if the content of a file does not match its name."""


class Memory(Protocol):
    """Allocates the memory that rows are read into. Its methods are thread-safe."""

    def lend(self, count: int) -> torch.Tensor | None:
        """Lend host memory for `count` rows, or return `None` to let the caller allocate it."""
        ...

    def give_rows(self, rows: torch.Tensor) -> None:
        """Release rows. Rows that were not lent are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """The parsed header of an item's file."""

    metadata: dict[str, Any]
    checksum: str
    shape: Any
    nbytes: int  # of the values that follow the header


class Items(Protocol[K]):
    """The file format for one type of item, embeddings or pages, of one model."""

    what: str  # its name in logs
    layout: FolderLayout  # of the root directory
    folder: str  # this model's directory below the root
    lone: bool  # the directory is locked, so that only one server uses it
    durable: bool  # a file is flushed to the disk (fsync) before it is renamed to its final name

    def file(self, key: K) -> str:
        """Return the name of an item's file."""
        ...

    def metadata(self, key: K) -> dict[str, str]:
        """Return the fields of the header except for the checksum."""
        ...

    def checksum(self, key: K, values: memoryview) -> str: ...

    def empty(self, size: int) -> torch.Tensor:
        """Allocate memory for an item of this size."""
        ...

    def check(self, header: ItemHeader, name: str) -> tuple[K, int]:
        """Return the (key, size) of a file. Raises Damaged if the header does not match `name`."""
        ...

    def found(self, path: Path, seen: os.stat_result) -> tuple[K, int] | None:
        """Return a file's (key, size), or `None` if it is not a regular file.

        seen: the file's status.

        The size is in the unit of the tier's budget, which is rows of an embedding, or bytes of a
        page's file. Raises Damaged and OSError.
        """
        ...


class Embeddings:
    """The file format of the embeddings of one vision encoder, stored as rows [tokens, width]."""

    what = "embedding cache on disk"
    layout = store.EMBEDDING_FILES
    lone = False
    durable = True

    def __init__(self, fingerprint: bytes, width: int, dtype: torch.dtype) -> None:
        self.folder = fingerprint.hex()
        self._identity = {"format": FORMAT, "model": self.folder}
        self._width = width
        self._dtype = dtype

    def file(self, key: ImageKey) -> str:
        return store.file_name(key)

    def metadata(self, key: ImageKey) -> dict[str, str]:
        named = {"digest": key.digest.hex(), "settings": key.settings.hex(), "salt": key.salt}
        return self._identity | named

    def checksum(self, _: ImageKey, values: memoryview) -> str:
        return blake3(values).hexdigest()

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty((size, self._width), dtype=self._dtype)

    def check(self, header: ItemHeader, name: str) -> tuple[ImageKey, int]:
        metadata = header.metadata
        try:
            digest, settings = (
                bytes.fromhex(metadata["digest"]),
                bytes.fromhex(metadata["settings"]),
            )
            key = ImageKey(digest, settings, metadata["salt"])
            named = self.file(key)
        except UNREADABLE:
            raise Damaged("its header is invalid") from None
        if named != name:
            raise Damaged("the hash in it is of a different image")
        if any(metadata.get(name) != value for name, value in self._identity.items()):
            raise Damaged("it belongs to another model or format")
        num_tokens, rest = divmod(header.nbytes, self._width * self._dtype.itemsize)
        if rest or num_tokens < 1 or header.shape != [num_tokens, self._width]:
            raise Damaged("its size is wrong")
        return key, num_tokens

    def found(self, path: Path, _: os.stat_result) -> tuple[ImageKey, int] | None:
        with open_whole(path) as file:
            return self.check(read_header(file), path.name)


class Pages:
    """The file format of the KV pages and states of one identity, stored as rows uint8 [1, bytes].

    Files are not flushed to the disk, because the checksum detects a page that a power failure has
    truncated.
    """

    what = "KV cache on disk"
    layout = store.PAGE_FILES
    lone = True
    durable = False

    def __init__(self, identity: bytes) -> None:
        self.folder = store.identity_folder(identity)
        self._identity = identity.hex()

    def file(self, key: bytes) -> str:
        return store.page_file(key)

    def metadata(self, key: bytes) -> dict[str, str]:
        return {"format": PAGE_FORMAT, "identity": self._identity, "name": key.hex()}

    def checksum(self, key: bytes, values: memoryview) -> str:
        """Return a checksum that includes the page's key, so that the values of a different page
        never match.
        """
        return blake3(values, key=key).hexdigest()

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty((1, size), dtype=torch.uint8)

    def check(self, header: ItemHeader, name: str) -> tuple[bytes, int]:
        metadata = header.metadata
        if (metadata.get("format"), metadata.get("identity")) != (
            PAGE_FORMAT,
            self._identity,
        ):
            raise Damaged("it belongs to another model or format")
        key = bytes.fromhex(name.removesuffix(store.PAGE_SUFFIX))
        if metadata.get("name") != key.hex():
            raise Damaged("it contains a different page than its name says")
        if header.shape != [1, header.nbytes]:
            raise Damaged("its size is wrong")
        return key, header.nbytes

    def found(self, path: Path, seen: os.stat_result) -> tuple[bytes, int] | None:
        whole = stat.S_ISREG(seen.st_mode)  # pages are many, so their files are not opened here
        return (bytes.fromhex(path.stem), seen.st_size) if whole else None


def open_whole(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises Damaged if it is anything else."""
    try:
        return open(path, "rb", opener=beside)
    except Strange:
        raise Damaged("it is not a regular file") from None


def read_header(file: BufferedReader) -> ItemHeader:
    """Read the header, up to the values. Raises Damaged if it cannot be parsed."""
    text = file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER))
    try:
        fields = json.loads(text)
        metadata, shape = dict(fields["__metadata__"]), fields[TENSOR]["shape"]
        checksum = str(metadata["blake3"])
    except UNREADABLE:
        raise Damaged("its header is invalid") from None
    return ItemHeader(metadata, checksum, shape, os.fstat(file.fileno()).st_size - 8 - len(text))


def write_header(rows: torch.Tensor, metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file with one tensor, padded to a multiple of the disk
    block size.
    """
    dtype = SAFETENSORS_NAMES[rows.dtype]
    tensor = {"dtype": dtype, "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}
    text = json.dumps({"__metadata__": metadata, TENSOR: tensor}).encode()
    text += b" " * (-(8 + len(text)) % DISK_BLOCK)  # the budget counts whole blocks
    return len(text).to_bytes(8, "little") + text


def discard(what: str, path: Path, why: Damaged) -> None:
    """Remove a damaged file, if possible, and log a warning.

    what: the type of item, for the warning.

    Directories are not removed, and neither is a file in a directory that is not writable.
    """
    try:
        path.unlink()
    except OSError as error:
        log.warning(
            "%s: %s is not used (%s), and cannot be removed: %s", what, path.name, why, error
        )
    else:
        log.warning("%s: %s is removed: %s", what, path.name, why)
