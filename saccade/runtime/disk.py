"""Embeddings on disk: one safetensors file each, written and read by one thread beside the worker,
so that no step waits for a write.

A file is trusted only if everything fits: its name, format, model fingerprint, shape, and the
checksum of its values. Whatever else lies in the model's folder is removed, but for folders, and
for what could not be looked at: the next run may be able to. A file appears under its name only
when it is whole and on the disk (write, fsync, rename).
Decides nothing but this: what cannot be written is not written, what cannot be read is not there,
and `collect` says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3

from saccade.core.family import FamilySpec
from saccade.core.plan import DiskEvent
from saccade.core.types import ImageKey

log = logging.getLogger("saccade")

FORMAT = "saccade-embedding-1"
"""Changes whenever what the vision tower is given, or how its answer is kept, changes in a way that
the fingerprint does not show.
"""
SUFFIX = ".safetensors"
TENSOR = "embedding"
PENDING_BYTES = 1 << 30
"""Bytes that may wait to be written; what would come on top is not saved."""
LARGEST_HEADER = 1 << 16


def fingerprint_encoder(
    spec: FamilySpec,
    device: torch.device,
    encode: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
) -> bytes:
    """16 bytes that differ where the vision tower's answers do: weights, dtype, kind of device.
    What it makes of a test picture, hashed.

    encode: uint8 [H, W, 3] on `device` to [num_tokens, embedding_width]. Every rank must call this.
    """
    side = 4 * spec.image_rules.factor
    pixels = (
        (torch.arange(side * side * 3, dtype=torch.int64) * 2654435761 >> 7)
        .to(torch.uint8)
        .view(side, side, 3)
    )
    rows = encode([pixels.to(device)])[0].cpu()  # [16, embedding_width]
    told = repr((FORMAT, spec.family, device.type, str(rows.dtype), tuple(rows.shape)))
    return hashlib.blake2b(told.encode() + bytes(_bytes(rows)), digest_size=16).digest()


Lend = Callable[[int], torch.Tensor | None]
"""Memory on the CPU for so many rows of an embedding, or None."""


class Damaged(Exception):
    """The file is not what its name promises."""


@dataclass(frozen=True, slots=True)
class _Job:
    kind: Literal["read", "write", "remove"]
    key: ImageKey
    embedding: torch.Tensor | None = None
    wait: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class _Header:
    key: ImageKey
    num_tokens: int
    checksum: str


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
        self.found = self._scan()
        self._jobs: deque[_Job] = deque()
        self._pending: Counter[ImageKey] = Counter()  # writes and removals not yet done
        self._pending_bytes = 0
        self._reading = 0  # reads not yet done
        self._events: deque[DiskEvent] = deque()
        self._read: dict[ImageKey, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._lend: Lend = lambda _: None
        self._give: Callable[[torch.Tensor], None] = lambda _: None
        self._thread = threading.Thread(target=self._work, name="saccade-disk", daemon=True)
        self._thread.start()

    def use(self, lend: Lend, give: Callable[[torch.Tensor], None]) -> None:
        """Read into memory from `lend`, where it has some, and `give` back what has been written.
        Before the first job; both are called by the thread.
        """
        self._lend, self._give = lend, give

    def write(
        self, key: ImageKey, embedding: torch.Tensor, wait: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to write `embedding` [n, width], which is on the CPU and, once `wait` returns, does
        not change any more. `wait` is called by the thread.
        """
        with self._changed:
            if self._pending_bytes + embedding.nbytes <= PENDING_BYTES:
                self._pending_bytes += embedding.nbytes
                self._put(_Job("write", key, embedding, wait))
                return
            self._events.append((key, "not saved"))
        self._give(embedding)

    def pass_over(self, key: ImageKey) -> None:
        """There was no room to write it."""
        with self._changed:
            self._events.append((key, "not saved"))
            self._changed.notify_all()

    def read(self, key: ImageKey) -> None:
        """Begin to read; `collect` says when it has been."""
        with self._changed:
            self._put(_Job("read", key))

    def remove(self, key: ImageKey) -> None:
        with self._changed:
            self._put(_Job("remove", key))

    def take(self, key: ImageKey) -> torch.Tensor:
        """What was read, [n, width] on the CPU; no longer kept here. The taker gives back what was
        lent.
        """
        with self._changed:
            return self._read.pop(key)

    def forget(self, key: ImageKey) -> None:
        """What was read is not needed."""
        self._give(self.take(key))

    def collect(self, wait: bool) -> tuple[DiskEvent, ...]:
        """What has come to pass since the last call; with `wait`, at least one event, for which a
        read must be under way.

        Raises RuntimeError if the thread has failed: what it was to read will never come.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._events or self._ended)
            if self._ended and not self._closed:
                raise RuntimeError("the thread that reads and writes embeddings on disk has failed")
            events = tuple(self._events)
            self._events.clear()
        return events

    @property
    def told(self) -> bool:
        """Whether `collect` has something to tell, were it bad news."""
        with self._changed:
            return bool(self._events) or self._ended

    @property
    def busy(self) -> bool:
        """Whether a read is under way, or has ended and `collect` has not told."""
        with self._changed:
            return bool(self._events) or self._reading > 0 or self._ended

    def close(self) -> None:
        """Do what is left to do, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _put(self, job: _Job) -> None:
        self._jobs.append(job)
        if job.kind == "read":
            self._reading += 1
        else:
            self._pending[job.key] += 1
        self._changed.notify_all()

    # ---- the thread

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._finish(job, self._do(job))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Somebody waits for a read: it goes before all others, but for those of the same picture.

        None: closed, and nothing left.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            for job in self._jobs:
                if job.kind == "read" and not self._pending[job.key]:
                    self._jobs.remove(job)
                    return job
            return self._jobs.popleft() if self._jobs else None

    def _finish(self, job: _Job, event: DiskEvent | None) -> None:
        with self._changed:
            if job.kind == "read":
                self._reading -= 1
            else:
                self._pending[job.key] -= 1
                self._pending_bytes -= job.embedding.nbytes if job.embedding is not None else 0
            if event is not None:
                self._events.append(event)
                self._changed.notify_all()

    def _do(self, job: _Job) -> DiskEvent | None:
        path = self._path(job.key)
        try:
            if job.kind == "remove":
                path.unlink(missing_ok=True)
            elif job.embedding is not None:
                try:
                    job.wait()
                    self._store(path, job.key, job.embedding)
                finally:
                    self._give(job.embedding)
            else:
                embedding = self._load(path, job.key)
                with self._changed:
                    self._read[job.key] = embedding
                return job.key, "read"
            return None
        except Damaged as error:
            _discard(path, error)
        except (
            OSError
        ) as error:  # it may pass (too many open files, a disk that is away): the file stays
            log.warning("embedding cache on disk: %s %s: %s", job.kind, path.name, error)
        if job.kind == "remove":
            return None
        return job.key, "not read" if job.kind == "read" else "not saved"

    # ---- files

    def _path(self, key: ImageKey) -> Path:
        name = hashlib.blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
        return self._folder / (name.hexdigest() + SUFFIX)

    def _store(self, path: Path, key: ImageKey, embedding: torch.Tensor) -> None:
        metadata = self._identity | {
            "digest": key.digest.hex(),
            "settings": key.settings.hex(),
            "salt": key.salt,
        }
        values = _bytes(embedding)
        header = _write_header(embedding, metadata | {"blake3": blake3(values).hexdigest()})
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.touch(mode=0o600)
            with draft.open("wb") as file:
                file.write(header)
                file.write(values)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _load(self, path: Path, key: ImageKey) -> torch.Tensor:
        """Raises Damaged, and OSError where the file cannot be read."""
        with _open(path) as file:
            header = self._header(file, path)
            rows = self._lend(header.num_tokens)
            if rows is None:
                rows = torch.empty((header.num_tokens, self._width), dtype=self._dtype)
            try:
                values = _bytes(rows)
                if header.key != key:
                    raise Damaged("it holds another picture")
                # Whoever shortens the file meanwhile does not go unseen.
                if file.readinto(values) != len(values) or file.read(1):
                    raise Damaged("its size is wrong")
                if blake3(values).hexdigest() != header.checksum:
                    raise Damaged("its checksum is wrong")
            except (Damaged, OSError):
                self._give(rows)
                raise
        return rows

    def _scan(self) -> tuple[tuple[ImageKey, int], ...]:
        """What is whole by its name, header and size, the oldest first."""
        found: list[tuple[int, ImageKey, int]] = []
        for path in self._folder.iterdir():
            try:
                with _open(path) as file:
                    header = self._header(file, path)
                    found.append(
                        (os.fstat(file.fileno()).st_mtime_ns, header.key, header.num_tokens)
                    )
            except Damaged as error:
                _discard(path, error)
            except OSError as error:
                log.warning("embedding cache on disk: %s is not used: %s", path.name, error)
        return tuple(
            (key, num_tokens) for _, key, num_tokens in sorted(found, key=lambda each: each[0])
        )

    def _header(self, file: BufferedReader, path: Path) -> _Header:
        """Read up to the values. Raises Damaged where anything does not fit, whoever wrote it."""
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
            named = self._path(key)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Damaged("its header makes no sense") from None
        if named != path:
            raise Damaged("its name is another picture's")
        if any(metadata.get(name) != value for name, value in self._identity.items()):
            raise Damaged("it is of another model or format")
        row = self._width * self._dtype.itemsize
        num_tokens, rest = divmod(size - 8 - len(text), row)
        if rest or num_tokens < 1 or shape != [num_tokens, self._width]:
            raise Damaged("its size is wrong")
        return _Header(key, num_tokens, checksum)


def _open(path: Path) -> BufferedReader:
    """A file to read.

    Raises Damaged for all else: a link leads anywhere, and opening a pipe waits for somebody to
    write.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged("it is not a regular file")
    return path.open("rb")


def _discard(path: Path, why: Damaged) -> None:
    """Remove what is not what its name promises, if that can be done: a folder cannot, and nothing
    can where writing is forbidden.
    """
    try:
        path.unlink()
    except OSError as error:
        log.warning(
            "embedding cache on disk: %s is not used (%s), and cannot be removed: %s",
            path.name,
            why,
            error,
        )
    else:
        log.warning("embedding cache on disk: %s is removed: %s", path.name, why)


def _write_header(rows: torch.Tensor, metadata: dict[str, str]) -> bytes:
    """A safetensors file of one tensor, up to its values."""
    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[rows.dtype]
    tensor = {"dtype": dtype, "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}
    text = json.dumps({"__metadata__": metadata, TENSOR: tensor}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(rows: torch.Tensor) -> memoryview:
    """The values of contiguous rows on the CPU, without a copy."""
    return rows.view(torch.uint8).numpy().reshape(-1).data
