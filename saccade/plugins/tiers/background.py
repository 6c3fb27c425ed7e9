"""Runs a store's I/O in a separate thread of the worker, so that steps are not blocked.

A write that fails is skipped, and an item that cannot be read counts as missing. `collect` reports
both.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from saccade.core.given_paths import reason
from saccade.core.plan import Happened
from saccade.plugins.tiers.items import Damaged
from saccade.plugins.tiers.rare_warnings import RareWarnings
from saccade.plugins.tiers.store import Store
from saccade.runtime.tiers import Ready

PENDING_BYTES = 1 << 30
"""Maximum bytes queued for writing. Items beyond it are reported as not saved."""


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Job(Generic[K]):
    kind: Literal["read", "write", "remove"]
    key: K
    size: int = 0
    rows: torch.Tensor | None = None
    ready: Ready = None


class Background(Generic[K]):
    """Reads and writes the items of `store` in a background thread. Call its methods from one
    thread.
    """

    def __init__(self, store: Store[K]) -> None:
        self.store = store
        self._jobs: deque[_Job[K]] = deque()
        self._pending: Counter[K] = Counter()  # writes and removals not yet done
        self._pending_bytes = 0
        self._reading = 0  # reads not yet done
        self._events: deque[tuple[K, Happened]] = deque()
        self._read: dict[K, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._warnings = RareWarnings()  # used by the I/O thread only
        self._thread = threading.Thread(target=self._work, name="saccade-disk", daemon=True)
        self._thread.start()

    def write(self, key: K, rows: torch.Tensor, ready: Ready = None) -> bool:
        """Queue a write of `rows`, which are in host memory. They must not change once they are
        `ready`.

        Returns False if too many bytes are queued. Then the caller must release the rows.
        """
        with self._changed:
            if self._pending_bytes + rows.nbytes > PENDING_BYTES:
                self._events.append((key, "not saved"))
                return False
            self._pending_bytes += rows.nbytes
            self._put(_Job("write", key, rows=rows, ready=ready))
            return True

    def pass_over(self, key: K) -> None:
        """Report an item as not saved, because there was no free buffer to copy it to."""
        with self._changed:
            self._events.append((key, "not saved"))
            self._changed.notify_all()

    def begin_read(self, key: K, size: int) -> None:
        """Queue a read of an item. `collect` reports when it has finished.

        size: the item's size in the unit of `Items.check`.
        """
        with self._changed:
            self._put(_Job("read", key, size))

    def remove(self, key: K) -> None:
        with self._changed:
            self._put(_Job("remove", key))

    def has_read(self, key: K) -> bool:
        """Return True if the rows of `key` have been read and not yet taken."""
        with self._changed:
            return key in self._read

    def take_rows(self, key: K) -> torch.Tensor:
        """Remove and return the rows that were read, in host memory. The caller must release lent
        memory.
        """
        with self._changed:
            return self._read.pop(key)

    def collect(self, wait: bool) -> tuple[tuple[K, Happened], ...]:
        """Return the events since the last call.

        wait: block until there is an event. Use this only while a read is in progress.

        Raises RuntimeError if the thread has failed, because its reads will never finish.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._events or self._ended)
            if self._ended and not self._closed:
                what = self.store.what
                raise RuntimeError(f"the I/O thread of the {what} failed")
            events = tuple(self._events)
            self._events.clear()
        return events

    @property
    def has_events(self) -> bool:
        """Whether `collect` would return an event or raise."""
        with self._changed:
            return bool(self._events) or self._ended

    @property
    def busy(self) -> bool:
        """Whether a read is in progress, or an event awaits `collect`."""
        with self._changed:
            return bool(self._events) or self._reading > 0 or self._ended

    def close(self) -> None:
        """Finish all queued jobs, then stop the thread and close the store."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.store.close()

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
        """Block until there is a job, and remove and return it. Returns `None` if the queue is
        closed and empty.

        Reads run before all other jobs, except for a pending write or removal of the same item.
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
                self._pending_bytes -= job.rows.nbytes if job.rows is not None else 0
            if event is not None:
                self._events.append(event)
                self._changed.notify_all()

    def _do(self, job: _Job[K]) -> tuple[K, Happened] | None:
        store = self.store
        failed: Happened = "not read"
        try:
            if job.kind == "remove":
                store.drop(job.key)
            elif job.rows is not None:
                store.put(job.key, job.rows, job.ready)
            else:
                rows, _ = store.get(job.key, job.size)
                with self._changed:
                    self._read[job.key] = rows
                return job.key, "read"
            return None
        except Damaged:
            failed = "damaged"
        except FileNotFoundError:
            if not store.shared or job.kind != "read":
                self._warnings.warn(
                    f"{store.what}: gone", f"{store.what}: {store.name(job.key)} was removed"
                )
            failed = "missing"
        except (
            OSError
        ) as error:  # it may be temporary (too many open files, an unmounted disk): keep the file
            self._warnings.warn(
                f"{store.what}: {job.kind}: {reason(error)}",
                f"{store.what}: {job.kind} {store.name(job.key)}: {error}",
            )
        if job.kind == "remove":
            return None
        return job.key, failed if job.kind == "read" else "not saved"
