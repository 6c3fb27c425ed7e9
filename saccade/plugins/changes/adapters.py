"""Loads LoRA adapters from directories (`nn/adapter_files.py`) into a running network.

It keeps track of which adapters are loaded, and of the slots that use them. Anything unsupported is
rejected before the network is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from saccade.core.plan import Change, Changed, Row
from saccade.families.registry import family_model
from saccade.kernels.device import send
from saccade.kernels.reference.low_rank import AdapterRows
from saccade.nn.adapter_files import ReadAdapter, read_adapter
from saccade.nn.low_rank import Adapters
from saccade.nn.protocol import FamilyNet
from saccade.parallel import Shard
from saccade.plugins.changes.agreement import agree, attempt
from saccade.runtime.worker import NOT_LOADED


class AdapterTable:
    """One rank's loaded LoRA adapters, and the slots of the sequences that use one."""

    def __init__(
        self,
        adapters: Adapters,
        canonical_name: Callable[[str], str],
        like: torch.Tensor,
        everyone: Shard,
    ) -> None:
        """Create an empty table.

        like: a tensor of the network, whose dtype and device adapters get.
        """
        self._adapters = adapters
        self._canonical_name = canonical_name
        self._like = like
        self._everyone = everyone
        self._loaded: set[int] = set()
        self._slots: dict[int, int] = {}  # the adapter's number, for slots that have one

    @property
    def empty(self) -> bool:
        return not self._loaded

    def check(self, adapter: int) -> None:
        """Assert that the adapter with this number is loaded."""
        assert adapter in self._loaded, NOT_LOADED

    def open(self, slot: int, adapter: int) -> None:
        """Assign a loaded adapter to the sequence in `slot`."""
        self.check(adapter)
        self._slots[slot] = adapter

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def rows(self, rows: Sequence[Row]) -> tuple[AdapterRows, ...]:
        """Return the tokens of each adapter in a step with these rows. Steps with adapters run
        without graphs.
        """
        found: dict[int, list[tuple[int, int]]] = {}  # ranges of tokens by adapter
        first = 0
        for row in rows:
            end = first + row.length
            if adapter := self._slots.get(row.slot):
                runs = found.setdefault(adapter, [])
                if runs and runs[-1][1] == first:
                    runs[-1] = runs[-1][0], end
                else:
                    runs.append((first, end))
            first = end
        return tuple((number, self._tokens(runs)) for number, runs in found.items())

    def _tokens(self, runs: Sequence[tuple[int, int]]) -> slice | torch.Tensor:
        if len(runs) == 1:
            return slice(*runs[0])
        each = np.concatenate([np.arange(*run) for run in runs])
        return send(each, self._like.device)

    def make(self, change: Change) -> Changed:
        """Load or unload an adapter on every rank or, if that fails on any rank, on none."""
        if change.kind == "drop adapter":
            self.check(change.adapter)
            self._drop(change.adapter)
            return Changed()
        folder = Path(change.folder)
        made, error = attempt(folder, lambda: self._read(change.adapter, folder))
        found, nbytes = made or (None, 0)
        fingerprint = found.fingerprint if found else ""
        if not agree(fingerprint, self._like, self._everyone):
            error = error or (
                f"{change.folder}: another rank could not read it, or read different content"
            )
        if error or found is None:
            self._drop(change.adapter)
            return Changed(error)
        self._loaded.add(change.adapter)
        return Changed("", found.fingerprint, found.tower, found.rank, nbytes)

    def _read(self, adapter: int, folder: Path) -> tuple[ReadAdapter, int]:
        """Load an adapter from a directory to the device. Returns the adapter, and the bytes that
        it takes on the device.
        """
        found = read_adapter(folder, self._adapters.modules, self._canonical_name)
        return found, self._adapters.put(adapter, found.factors, self._like)

    def _drop(self, adapter: int) -> None:
        self._loaded.discard(adapter)
        self._adapters.drop(adapter)


def open_table(net: FamilyNet, like: torch.Tensor, everyone: Shard) -> AdapterTable:
    """Create an empty table of adapters for a network."""
    return AdapterTable(net.adapters, family_model(net.spec).canonical_name, like, everyone)
