"""Adapters (LoRA) from their folders (`nn/adapter_files.py`) to the products of a built network.

Owns the numbers of loaded adapters. Anything unsupported is refused by name, before any change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from saccade.core.plan import Change, Changed
from saccade.families.registry import family_model
from saccade.nn.adapter_files import ReadAdapter, read_adapter
from saccade.nn.low_rank import Adapters
from saccade.nn.protocol import FamilyNet
from saccade.parallel import Shard
from saccade.runtime.agreement import agree, attempt


class AdapterTable:
    """The adapters of one rank's network."""

    def __init__(
        self,
        adapters: Adapters,
        canonical_name: Callable[[str], str],
        like: torch.Tensor,
        everyone: Shard,
    ) -> None:
        """`like` has the dtype and the device of the network."""
        self._adapters = adapters
        self._canonical_name = canonical_name
        self._like = like
        self._everyone = everyone
        self._loaded: set[int] = set()

    @property
    def empty(self) -> bool:
        return not self._loaded

    def check(self, adapter: int) -> None:
        """Assert that the adapter is loaded, or 0."""
        assert not adapter or adapter in self._loaded, "an adapter that is not loaded"

    def make(self, change: Change) -> Changed:
        """Carry out a change on every rank: all make the change, or none."""
        if change.kind == "drop adapter":
            self.check(change.adapter)
            self._drop(change.adapter)
            return Changed()
        folder = Path(change.folder)
        made, error = attempt(folder, lambda: self._read(change.adapter, folder))
        found, nbytes = made or (None, 0)
        fingerprint = found.fingerprint if found else ""
        if not agree(fingerprint, self._like, self._everyone):
            error = error or f"{change.folder}: another rank could not read it, or read another"
        if error or found is None:
            self._drop(change.adapter)
            return Changed(error)
        self._loaded.add(change.adapter)
        return Changed("", found.fingerprint, found.tower, found.rank, nbytes)

    def _read(self, adapter: int, folder: Path) -> tuple[ReadAdapter, int]:
        """What a folder holds, and the bytes that it takes on the device."""
        found = read_adapter(folder, self._adapters.modules, self._canonical_name)
        return found, self._adapters.put(adapter, found.factors, self._like)

    def _drop(self, adapter: int) -> None:
        self._loaded.discard(adapter)
        self._adapters.drop(adapter)


def open_table(net: FamilyNet, like: torch.Tensor, everyone: Shard) -> AdapterTable:
    """The table for a network without adapters yet."""
    return AdapterTable(net.adapters, family_model(net.spec).canonical_name, like, everyone)
