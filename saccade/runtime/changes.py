"""Protocols for changing the model of a running worker. Plugins implement them."""

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
    """Stores the loaded adapters, and which slots use them."""

    def check(self, adapter: int) -> None:
        """Assert that the adapter is loaded."""
        ...

    def open(self, slot: int, adapter: int) -> None:
        """Use a loaded adapter for the sequence that was opened in `slot`."""
        ...

    def close(self, slot: int) -> None: ...

    def rows(self, rows: Sequence[Row]) -> tuple[AdapterRows, ...]:
        """Return the tokens that use each adapter, in a step with these rows.

        If there are any, the step must run without CUDA graphs.
        """
        ...


class ModelChanges(Protocol):
    """Changes a worker's model, for example its weights, between steps."""

    def make(self, change: Change) -> Changed:
        """Apply a change on all ranks, or on none if it fails on any rank. Return the outcome."""
        ...
