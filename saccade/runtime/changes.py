"""Protocols of the plugin that changes a running worker's model, and of the adapters that
it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from saccade.core.plan import Change, Changed, Row
from saccade.kernels.reference.low_rank import AdapterRows
from saccade.nn.protocol import FamilyNet

LoadNet = Callable[[Path], tuple[FamilyNet, str]]
"""Loads this rank's slice of the checkpoint in a directory or file. Also returns the digest of this
rank's slice of the vision encoder. Raises StartupError.
"""


class SlotAdapters(Protocol):
    """The loaded adapters, and which slots use them."""

    def check(self, adapter: int) -> None:
        """Assert that the adapter is loaded."""
        ...

    def open(self, slot: int, adapter: int) -> None:
        """Use a loaded adapter for the sequence that was opened in `slot`."""
        ...

    def close(self, slot: int) -> None: ...

    def rows(self, rows: Sequence[Row]) -> tuple[AdapterRows, ...]:
        """Return the tokens that use each adapter, in a step with these rows. Such a step must run
        without CUDA graphs.
        """
        ...


class ModelChanges(Protocol):
    """Changes a worker's model between steps, for example its weights."""

    def make(self, change: Change) -> Changed:
        """Apply a change on all ranks, or on none if it fails on one of them."""
        ...
