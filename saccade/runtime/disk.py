"""Embeddings on disk: one safetensors file each, written and read by one thread beside the worker, so that no step waits for a write.

A file is trusted only if everything fits: its name, format, model fingerprint, shape, and the checksum of its values. Whatever else
lies in the model's folder is removed. A file appears under its name only when it is whole and on the disk (write, fsync, rename).
Decides nothing but this: what cannot be written is not written, and `collect` says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save

from saccade.core.family import FamilySpec
from saccade.core.plan import DiskEvent
from saccade.core.types import ImageKey

log = logging.getLogger("saccade")

FORMAT = "saccade-embedding-1"
"""Changes whenever what the vision tower is given, or how its answer is kept, changes in a way that the fingerprint does not show."""
SUFFIX = ".safetensors"
TENSOR = "embedding"
PENDING_BYTES = 1 << 30
"""Bytes that may wait to be written; what would come on top is not saved."""
LARGEST_HEADER = 1 << 16


def fingerprint_encoder(spec: FamilySpec, device: torch.device, encode: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> bytes:
    """16 bytes that differ where the vision tower's answers do: weights, dtype, kind of device. What it makes of a test picture, hashed.

    encode: uint8 [H, W, 3] on `device` to [num_tokens, embedding_width]. Every rank must call this.
    """
    side = 4 * spec.image_rules.factor
    pixels = (torch.arange(side * side * 3, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8).view(side, side, 3)
    rows = encode([pixels.to(device)])[0].cpu()  # [16, embedding_width]
    told = repr((FORMAT, spec.family, device.type, str(rows.dtype), tuple(rows.shape)))
    return hashlib.blake2b(told.encode() + _bytes(rows), digest_size=16).digest()


class Damaged(Exception):
    """The file is not what its name promises."""


@dataclass(frozen=True, slots=True)
class _Job:
    kind: Literal["read", "write", "remove"]
    key: ImageKey
    embedding: torch.Tensor | None = None


class DiskTier:
    """The embeddings of one model in `root`/<fingerprint>. All methods are called by one thread.

    `found`: (key, tokens) of what was there at the start, the oldest first.
    """

    def __init__(self, root: Path, fingerprint: bytes, width: int, dtype: torch.dtype) -> None:
        """Raises OSError where the folder cannot be had."""
        self._folder = root / fingerprint.hex()
        self._identity = {"format": FORMAT, "model": fingerprint.hex()}
        self._width = width
        self._dtype = dtype
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.found = tuple(self._scan())
        self._jobs: deque[_Job] = deque()
        self._pending: Counter[ImageKey] = Counter()  # writes and removals not yet done
        self._pending_bytes = 0
        self._events: deque[DiskEvent] = deque()
        self._read: dict[ImageKey, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade-disk", daemon=True)
        self._thread.start()

    def write(self, key: ImageKey, embedding: torch.Tensor) -> None:
        """Begin to write `embedding` [n, width], which is on the CPU and does not change any more."""
        with self._changed:
            if self._pending_bytes + embedding.nbytes > PENDING_BYTES:
                self._events.append((key, "not saved"))
                return
            self._pending_bytes += embedding.nbytes
            self._put(_Job("write", key, embedding))

    def read(self, key: ImageKey) -> None:
        """Begin to read; `collect` says when it has been."""
        with self._changed:
            self._put(_Job("read", key))

    def remove(self, key: ImageKey) -> None:
        with self._changed:
            self._put(_Job("remove", key))

    def take(self, key: ImageKey) -> torch.Tensor:
        """What was read, [n, width] on the CPU; no longer kept here."""
        with self._changed:
            return self._read.pop(key)

    def collect(self, wait: bool) -> tuple[DiskEvent, ...]:
        """What has come to pass since the last call; with `wait`, at least one event, for which a read must be under way."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._events or not self._thread.is_alive())
            assert self._closed or self._thread.is_alive(), "the thread beside the worker has failed"
            events = tuple(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Do what is left to do, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _put(self, job: _Job) -> None:
        self._jobs.append(job)
        if job.kind != "read":
            self._pending[job.key] += 1
        self._changed.notify_all()

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._next()
            event = self._do(job)
            with self._changed:
                if job.kind != "read":
                    self._pending[job.key] -= 1
                    self._pending_bytes -= job.embedding.nbytes if job.embedding is not None else 0
                if event is not None:
                    self._events.append(event)
                    self._changed.notify_all()

    def _next(self) -> _Job:
        """Somebody waits for a read: it goes before all others, but for those of the same picture."""
        for job in self._jobs:
            if job.kind == "read" and not self._pending[job.key]:
                self._jobs.remove(job)
                return job
        return self._jobs.popleft()

    def _do(self, job: _Job) -> DiskEvent | None:
        path = self._path(job.key)
        try:
            if job.kind == "remove":
                path.unlink(missing_ok=True)
            elif job.embedding is not None:
                self._store(path, job.key, job.embedding)
            else:
                embedding = self._load(path, job.key)
                with self._changed:
                    self._read[job.key] = embedding
                return job.key, "read"
        except (OSError, Damaged) as error:
            log.warning("embedding cache on disk: %s %s: %s", job.kind, path.name, error)
            if job.kind == "read":
                path.unlink(missing_ok=True)
                return job.key, "damaged"
            return (job.key, "not saved") if job.kind == "write" else None
        return None

    # ---- files

    def _path(self, key: ImageKey) -> Path:
        name = hashlib.blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
        return self._folder / (name.hexdigest() + SUFFIX)

    def _store(self, path: Path, key: ImageKey, embedding: torch.Tensor) -> None:
        metadata = self._identity | {"digest": key.digest.hex(), "settings": key.settings.hex(), "salt": key.salt}
        data = save({TENSOR: embedding}, metadata | {"blake3": _checksum(embedding)})
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.touch(mode=0o600)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _load(self, path: Path, key: ImageKey) -> torch.Tensor:
        data = path.read_bytes()
        found, _ = self._parse(data[8 : 8 + int.from_bytes(data[:8], "little")], len(data))
        if found != key:
            raise Damaged("it holds another picture")
        try:
            embedding = load(data)[TENSOR]
        except SafetensorError as error:
            raise Damaged(str(error)) from None
        if _checksum(embedding) != json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["blake3"]:
            raise Damaged("its checksum is wrong")
        return embedding

    def _scan(self) -> Iterator[tuple[ImageKey, int]]:
        """What is whole by its name, header and size, the oldest first; everything else is removed."""
        for path in sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime_ns):
            try:
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    key, num_tokens = self._parse(file.read(min(length, LARGEST_HEADER)), path.stat().st_size)
                if path != self._path(key):
                    raise Damaged("its name is another picture's")
                yield key, num_tokens
            except (OSError, Damaged) as error:
                log.warning("embedding cache on disk: %s is removed: %s", path.name, error)
                if path.is_file():
                    path.unlink()

    def _parse(self, header: bytes, size: int) -> tuple[ImageKey, int]:
        """(key, tokens) of a file of `size` bytes. Raises Damaged."""
        try:
            told = json.loads(header)
            metadata, tensor = told["__metadata__"], told[TENSOR]
            key = ImageKey(bytes.fromhex(metadata["digest"]), bytes.fromhex(metadata["settings"]), metadata["salt"])
            num_tokens, width = tensor["shape"]
            end = tensor["data_offsets"][1]
        except (ValueError, KeyError, TypeError, IndexError):
            raise Damaged("its header makes no sense") from None
        if any(metadata.get(name) != value for name, value in self._identity.items()) or width != self._width:
            raise Damaged("it is of another model or format")
        if size != 8 + len(header) + end or end != num_tokens * width * self._dtype.itemsize:
            raise Damaged("it is cut short")
        return key, num_tokens


def _checksum(embedding: torch.Tensor) -> str:
    return blake3(_bytes(embedding)).hexdigest()


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()
