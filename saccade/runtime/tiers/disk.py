"""The disk tier: embeddings (`files.py`) or KV pages (`page_files.py`) written and read by one
thread next to the worker, so that steps go on meanwhile.

Owns the thread and its jobs. Decides only on failures: items that cannot be written are skipped,
unreadable items are missing, and `collect` says so.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import torch

from saccade.core.config import TowerQuantization
from saccade.core.family import FamilySpec
from saccade.core.given_paths import reason
from saccade.core.plan import Happened
from saccade.core.rare_warnings import RareWarnings
from saccade.core.types import Grid
from saccade.runtime.tiers.files import FORMAT, Damaged, Lend, discard, values_of

PENDING_BYTES = 1 << 30
"""Bytes that may wait to be written; what would come on top is not saved."""


def fingerprint_encoder(
    spec: FamilySpec,
    device: torch.device,
    encode: Callable[[torch.Tensor, Grid], torch.Tensor],
    quantization: TowerQuantization = "none",
) -> bytes:
    """Return 16 bytes that differ with the vision tower's answers.

    They are a hash of the tower's output for a test image, so that weights, their bits, dtype and
    the kind of device count. encode: a canvas uint8 [H, W, 3] on `device`, with its grid, to
    [num_tokens, embedding_width]. Every rank must call.
    """
    height, width = spec.sample.canvas
    pixels = (
        (torch.arange(height * width * 3, dtype=torch.int64) * 2654435761 >> 7)
        .to(torch.uint8)
        .view(height, width, 3)
    )
    rows = encode(pixels.to(device), spec.sample.grid).cpu()  # [tokens, embedding_width]
    told = repr((FORMAT, spec.family, device.type, str(rows.dtype), tuple(rows.shape)))
    if quantization != "none":
        told += quantization
    return hashlib.blake2b(told.encode() + bytes(values_of(rows)), digest_size=16).digest()


K = TypeVar("K", bound=Hashable)


class Files(Protocol[K]):
    """Files by key, for the thread (`files.EmbeddingFiles`, `page_files.PageFiles`)."""

    @property
    def what(self) -> str:
        """Name the files for logs."""
        ...

    @property
    def shared(self) -> bool:
        """Return True if other servers remove files, too."""
        ...

    @property
    def folder(self) -> Path: ...

    def path(self, key: K) -> Path: ...

    def store(self, path: Path, key: K, rows: torch.Tensor, /) -> None:
        """Write an item's rows. Raises OSError."""
        ...

    def load(
        self, path: Path, key: K, lend: Lend, give: Callable[[torch.Tensor], None], size: int | None
    ) -> torch.Tensor:
        """Read an item's rows. size: how many are expected. Raises Damaged, OSError."""
        ...

    def scan(self) -> tuple[tuple[K, int], ...]:
        """Return (key, size) for all files, the oldest first."""
        ...

    def close(self) -> None:
        """Close the files. Call last."""
        ...


@dataclass(frozen=True, slots=True)
class _Job(Generic[K]):
    kind: Literal["read", "write", "remove"]
    key: K
    num_tokens: int | None = None
    embedding: torch.Tensor | None = None
    wait: Callable[[], None] = lambda: None


class DiskTier(Generic[K]):
    """The items in `files`. One thread calls all methods.

    `found`: (key, tokens) for items present at the start, the oldest first.
    """

    def __init__(self, files: Files[K]) -> None:
        self.files = files
        self.found = files.scan()
        self._jobs: deque[_Job[K]] = deque()
        self._pending: Counter[K] = Counter()  # writes and removals not yet done
        self._pending_bytes = 0
        self._reading = 0  # reads not yet done
        self._events: deque[tuple[K, Happened]] = deque()
        self._read: dict[K, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._warnings = RareWarnings()  # the thread's
        self._lend: Lend = lambda _: None
        self._give: Callable[[torch.Tensor], None] = lambda _: None
        self._thread = threading.Thread(target=self._work, name="saccade-disk", daemon=True)
        self._thread.start()

    def use(self, lend: Lend, give: Callable[[torch.Tensor], None]) -> None:
        """Read into memory from `lend`, if any, and `give` back written memory.

        Call before the first job. The thread calls both.
        """
        self._lend, self._give = lend, give

    def write(
        self, key: K, embedding: torch.Tensor, wait: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to write `embedding` [n, width], on the CPU and unchanging once `wait` returns.

        The thread calls `wait`.
        """
        with self._changed:
            if self._pending_bytes + embedding.nbytes <= PENDING_BYTES:
                self._pending_bytes += embedding.nbytes
                self._put(_Job("write", key, len(embedding), embedding, wait))
                return
            self._events.append((key, "not saved"))
        self._give(embedding)

    def pass_over(self, key: K) -> None:
        """Report an item as not saved, for want of memory to write from."""
        with self._changed:
            self._events.append((key, "not saved"))
            self._changed.notify_all()

    def read(self, key: K, num_tokens: int | None = None) -> None:
        """Begin to read. `collect` reports the end.

        A file with another number of tokens than `num_tokens`, if given, is damaged.
        """
        with self._changed:
            self._put(_Job("read", key, num_tokens))

    def remove(self, key: K) -> None:
        with self._changed:
            self._put(_Job("remove", key))

    def has_read(self, key: K) -> bool:
        """Return True if `take` has rows to take."""
        with self._changed:
            return key in self._read

    def take(self, key: K) -> torch.Tensor:
        """Take the rows read, [n, width] on the CPU. The taker gives back lent memory."""
        with self._changed:
            return self._read.pop(key)

    def forget(self, key: K) -> None:
        """Drop rows that were read and have become unneeded."""
        self._give(self.take(key))

    def collect(self, wait: bool) -> tuple[tuple[K, Happened], ...]:
        """Return the events since the last call. With `wait`, waits for one, while a read is under
        way.

        Raises RuntimeError if the thread has failed: its reads will never come.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._events or self._ended)
            if self._ended and not self._closed:
                what = self.files.what
                raise RuntimeError(f"the thread that reads and writes the {what} has failed")
            events = tuple(self._events)
            self._events.clear()
        return events

    @property
    def told(self) -> bool:
        """Return True if `collect` has something to report, even bad news."""
        with self._changed:
            return bool(self._events) or self._ended

    @property
    def busy(self) -> bool:
        """Return True while a read is under way, or has ended and awaits `collect`."""
        with self._changed:
            return bool(self._events) or self._reading > 0 or self._ended

    def close(self) -> None:
        """Do the remaining work, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.files.close()

    def _put(self, job: _Job[K]) -> None:
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
            self._warnings.close()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> _Job[K] | None:
        """Wait for the next job and return it, or `None` once closed and done.

        Awaited reads go before all jobs but those for the same image.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            for job in self._jobs:
                if job.kind == "read" and not self._pending[job.key]:
                    self._jobs.remove(job)
                    return job
            return self._jobs.popleft() if self._jobs else None

    def _finish(self, job: _Job[K], event: tuple[K, Happened] | None) -> None:
        with self._changed:
            if job.kind == "read":
                self._reading -= 1
            else:
                self._pending[job.key] -= 1
                self._pending_bytes -= job.embedding.nbytes if job.embedding is not None else 0
            if event is not None:
                self._events.append(event)
                self._changed.notify_all()

    def _do(self, job: _Job[K]) -> tuple[K, Happened] | None:
        path = self.files.path(job.key)
        failed: Happened = "not read"
        try:
            if job.kind == "remove":
                path.unlink(missing_ok=True)
            elif job.embedding is not None:
                try:
                    job.wait()
                    self.files.store(path, job.key, job.embedding)
                finally:
                    self._give(job.embedding)
            else:
                embedding = self.files.load(path, job.key, self._lend, self._give, job.num_tokens)
                with self._changed:
                    self._read[job.key] = embedding
                return job.key, "read"
            return None
        except Damaged as error:
            discard(self.files.what, path, error)
            failed = "damaged"
        except FileNotFoundError:
            if not self.files.shared or job.kind != "read":
                self._warnings.warn(
                    f"{self.files.what}: gone", f"{self.files.what}: {path.name} has gone"
                )
            failed = "missing"
        except (
            OSError
        ) as error:  # it may pass (too many open files, a disk that is away): the file stays
            self._warnings.warn(
                f"{self.files.what}: {job.kind}: {reason(error)}",
                f"{self.files.what}: {job.kind} {path.name}: {error}",
            )
        if job.kind == "remove":
            return None
        return job.key, failed if job.kind == "read" else "not saved"
