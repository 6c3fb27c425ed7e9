"""What a worker asks of the plugin that changes its model, and of the adapters that it loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from saccade.core.plan import Change, Changed, Row
from saccade.kernels.reference.low_rank import AdapterRows
from saccade.nn.protocol import FamilyNet

LoadNet = Callable[[Path], tuple[FamilyNet, str]]
"""This rank's slice of the checkpoint in a folder or file, and the digest of its part of the vision
tower. Raises StartupError.
"""


class SlotAdapters(Protocol):
    """The slots whose rows use an adapter."""

    def check(self, adapter: int) -> None:
        """Assert that the adapter is loaded."""
        ...

    def open(self, slot: int, adapter: int) -> None:
        """Assign a loaded adapter to `slot`, for a sequence that enters it."""
        ...

    def close(self, slot: int) -> None: ...

    def rows(self, rows: Sequence[Row]) -> tuple[AdapterRows, ...]:
        """Return each adapter's tokens in a step with these rows, which runs without a graph."""
        ...


class ModelChanges(Protocol):
    """ModelChanges of a worker's model between steps."""

    def make(self, change: Change) -> Changed:
        """Make the change on every rank, or on none."""
        ...
