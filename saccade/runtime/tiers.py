"""The interface between a worker and the cache tiers that store embeddings and KV pages outside of
device memory: in host memory or on disk.

An item is an image's embedding, a KV page, or a sequence's state. Tiers make no decisions: the
engine decides what they store. On a CPU, the host tier of embeddings is device memory
(`SameMemory`). All other tiers are in plugins.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from saccade.core.config import EmbeddingBudgets
from saccade.core.errors import StartupError
from saccade.core.plan import DiskEvent, Move, PageEvent, PageMoves
from saccade.core.types import ImageKey
from saccade.plugins import builder

Asked = TypeVar("Asked", bound=Hashable, contravariant=True)
Ready = torch.cuda.Event | None
"""The event after which an item's data is valid. `None`: it is valid in current stream order."""


class Tier(Protocol[Asked]):
    """Stores items by key. The `size` of an item is the rows of an embedding or the bytes of a
    page.
    """

    def has(self, key: Asked) -> bool:
        """Return True if the tier probably has the item. It is not read to find out."""
        ...

    def put(self, key: Asked, rows: torch.Tensor, ready: Ready) -> None:
        """Store an item. The caller must not use `rows` afterwards.

        Raises OSError if writing to disk fails.
        """
        ...

    def get(self, key: Asked, size: int) -> tuple[torch.Tensor, Ready]:
        """Return an item's rows, and the event to wait for before they are used, if any.

        A tier on disk raises OSError if reading fails. If the data is corrupt, it drops the item
        and raises Damaged.
        """
        ...

    def drop(self, key: Asked) -> None: ...


class EmbeddingStore(Protocol):
    """The disk tier of embeddings, on rank 0. Reads and writes run in the background."""

    # (key, tokens) of embeddings that an earlier run stored, oldest first
    found: tuple[tuple[ImageKey, int], ...]
    shared: str  # the directory that is shared with other servers, or ""

    def save(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        """Start writing an embedding from the device to disk."""
        ...

    def move(self, move: Move) -> None:
        """Start to read or to delete an embedding, or drop one that was read."""
        ...

    def bring(self, key: ImageKey) -> tuple[torch.Tensor, Ready]:
        """Move an embedding that was read to the device.

        Returns its rows, and the event to wait for before they are used, if any.
        """
        ...

    @property
    def busy(self) -> bool:
        """True while a read is in progress, or has ended and `collect` has not reported it."""
        ...

    @property
    def has_events(self) -> bool:
        """True if `collect` would return an event or raise an error."""
        ...

    def collect(self, wait: bool) -> tuple[DiskEvent, ...]:
        """Return the events since the last call.

        Raises RuntimeError if the reads can never finish, because their thread has failed.

        wait: True to wait for at least one event if a read is in progress.
        """
        ...

    def close(self) -> None:
        """Finish all writes."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingTiers:
    """The cache tiers of embeddings other than device memory. Each is None if it is disabled."""

    host: Tier[ImageKey] | None = None
    disk: EmbeddingStore | None = None  # on rank 0 only


NO_TIERS = EmbeddingTiers()


class PageMemory(Protocol):
    """Stores one rank's part of the KV pages and states that are outside of device memory."""

    # (hash, bytes) of pages that an earlier run stored, oldest first
    found: tuple[tuple[bytes, int], ...]

    def move(self, moves: PageMoves) -> None:
        """Start the moves of KV pages that a plan contains. All ranks must call it."""
        ...

    @property
    def is_reading(self) -> bool:
        """True while a read is in progress, or has ended and `collect` has not reported it."""
        ...

    @property
    def has_events(self) -> bool:
        """True if `collect` has events to return."""
        ...

    def collect(self) -> tuple[PageEvent, ...]:
        """Return the reads and writes that have ended since the last call."""
        ...

    def close(self) -> None:
        """Finish all writes."""
        ...


class SameMemory:
    """The host tier of embeddings on a CPU, where host memory and device memory are the same."""

    def __init__(self) -> None:
        self._rows: dict[ImageKey, torch.Tensor] = {}

    def has(self, key: ImageKey) -> bool:
        return key in self._rows

    def put(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        assert ready is None, "a CPU computes at once"
        self._rows[key] = rows

    def get(self, key: ImageKey, _: int) -> tuple[torch.Tensor, Ready]:
        return self._rows[key], None

    def drop(self, key: ImageKey) -> None:
        del self._rows[key]


def open_tiers(
    budgets: EmbeddingBudgets, tower: str, like: torch.Tensor, rank: int
) -> EmbeddingTiers:
    """Return the embedding tiers that the options enable, on one rank.

    Raises StartupError.

    tower: the fingerprint of the vision encoder.
    like: an empty tensor [0, width] with the embeddings' dtype and device.
    """
    if build := builder(lambda plugin: plugin.caches.embedding_tiers, budgets, like):
        tiers: EmbeddingTiers = build(budgets, tower, like, rank)
        return tiers
    if budgets.folder is not None or (like.is_cuda and budgets.host_bytes):
        raise StartupError(
            "no installed plugin provides embedding tiers: start with "
            "--embedding-cache-host-mb 0 and without --embedding-cache-dir"
        )
    return EmbeddingTiers(SameMemory() if budgets.host_bytes else None)


def values_of(rows: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a memoryview, without a copy."""
    return rows.view(torch.uint8).numpy().reshape(-1).data
