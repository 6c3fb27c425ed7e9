"""Where embeddings and KV pages are kept beside the device: what a worker asks of such tiers.

An item is an image's embedding, or a KV page or state. A tier makes no decisions: the engine's
tables define its content. On a CPU host memory is the device's own. Plugins have all other tiers.
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
from saccade.plugins import builders

Asked = TypeVar("Asked", bound=Hashable, contravariant=True)
Ready = torch.cuda.Event | None
"""When rows are whole; None: in the order of the current stream."""


class Tier(Protocol[Asked]):
    """Items by key, as rows. size: rows of an embedding, bytes of a page."""

    def has(self, key: Asked) -> bool:
        """Return True if `get` is worth a try."""
        ...

    def put(self, key: Asked, rows: torch.Tensor, ready: Ready) -> None:
        """Keep rows, which are the tier's from now on. A store raises OSError."""
        ...

    def get(self, key: Asked, size: int) -> tuple[torch.Tensor, Ready]:
        """Return an item's rows. A store raises OSError, and Damaged where they are not what was
        put, which it then drops.
        """
        ...

    def drop(self, key: Asked) -> None: ...


class EmbeddingStore(Protocol):
    """The first rank's way to a tier that blocks, whose work is done beside the steps."""

    # (key, tokens) left by an earlier run, the oldest first
    found: tuple[tuple[ImageKey, int], ...]
    shared: str  # the folder where other servers find the same embeddings, or ""

    def save(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        """Begin to write an embedding that is on the device."""
        ...

    def move(self, move: Move) -> None:
        """Begin to read, or remove, or forget what was read."""
        ...

    def bring(self, key: ImageKey) -> tuple[torch.Tensor, Ready]:
        """Move to the device what was read."""
        ...

    @property
    def busy(self) -> bool:
        """Return True while a read is in progress, or has ended and awaits `collect`."""
        ...

    @property
    def has_events(self) -> bool:
        """Return True if `collect` has something to report, even bad news."""
        ...

    def collect(self, wait: bool) -> tuple[DiskEvent, ...]:
        """Return the events since the last call. With `wait`, waits for one, while a read is under
        way.

        Raises RuntimeError if its reads will never finish.
        """
        ...

    def close(self) -> None:
        """Finish all writing."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingTiers:
    """Each is `None` where it is off. disk: the first rank's alone."""

    host: Tier[ImageKey] | None = None
    disk: EmbeddingStore | None = None


NO_TIERS = EmbeddingTiers()


class PageMemory(Protocol):
    """One rank's part of KV pages and states beside the pool.

    found: (name, bytes) for pages left by an earlier run, the oldest first.
    """

    found: tuple[tuple[bytes, int], ...]

    def move(self, moves: PageMoves) -> None:
        """Carry out a plan's work on pages. Every rank must call."""
        ...

    @property
    def is_reading(self) -> bool:
        """Return True while a read is in progress, or has ended and awaits `collect`."""
        ...

    @property
    def has_events(self) -> bool:
        """Return True if `collect` has something to report."""
        ...

    def collect(self) -> tuple[PageEvent, ...]:
        """Return the reads and writes that have ended since the last call."""
        ...

    def close(self) -> None:
        """Finish all writing."""
        ...


class SameMemory:
    """The host tier for a CPU, which is the device's own memory."""

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
    """Open the tiers of embeddings that a server's options ask for, on one rank.

    tower: its fingerprint. like: [0, width], on the device. Raises StartupError.
    """
    for build in builders(lambda plugin: plugin.embedding_tiers, budgets, like):
        tiers: EmbeddingTiers = build(budgets, tower, like, rank)
        return tiers
    if budgets.folder is not None or (like.is_cuda and budgets.host_bytes):
        raise StartupError(
            "no installed plugin provides embedding tiers: start with "
            "--embedding-cache-host-mb 0 and without --embedding-cache-dir"
        )
    return EmbeddingTiers(SameMemory() if budgets.host_bytes else None)


def values_of(rows: torch.Tensor) -> memoryview:
    """View the values of contiguous rows on the CPU, without a copy."""
    return rows.view(torch.uint8).numpy().reshape(-1).data
