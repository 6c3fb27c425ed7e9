"""Adapters (LoRA) from their folders (`nn/adapter_files.py`) to the products of a built network.

Owns the numbers of loaded adapters. Anything unsupported is refused by name, before any change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from saccade.core.errors import CheckpointError
from saccade.core.plan import Change, Changed
from saccade.families.registry import family_model
from saccade.nn.adapter_files import FINGERPRINT_BYTES, ReadAdapter, read_adapter
from saccade.nn.low_rank import Adapters
from saccade.nn.protocol import FamilyNet
from saccade.parallel import Shard


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
        found: ReadAdapter | None = None
        nbytes, error = 0, ""
        try:
            found = read_adapter(Path(change.folder), self._adapters.modules, self._canonical_name)
            nbytes = self._adapters.put(change.adapter, found.factors, self._like)
        except CheckpointError as refused:
            error = str(refused)
        except (RuntimeError, MemoryError) as refused:  # torch has no class of its own on a CPU
            error = f"{change.folder}: there is no memory for it: {str(refused)[:200]}"
        fingerprint = found.fingerprint if found and not error else ""
        if not agree(fingerprint, self._like, self._everyone):
            error = error or f"{change.folder}: another rank could not read it, or read another"
        if error or found is None:
            self._drop(change.adapter)
            return Changed(error)
        self._loaded.add(change.adapter)
        return Changed("", found.fingerprint, found.tower, found.rank, nbytes)

    def _drop(self, adapter: int) -> None:
        self._loaded.discard(adapter)
        self._adapters.drop(adapter)


def open_table(net: FamilyNet, like: torch.Tensor, everyone: Shard) -> AdapterTable:
    """The table for a network without adapters yet."""
    return AdapterTable(net.adapters, family_model(net.spec).canonical_name, like, everyone)


def agree(fingerprint: str, like: torch.Tensor, everyone: Shard) -> bool:
    """True if every rank has read the same; fingerprint "": this rank could not."""
    mine = [float(byte) for byte in bytes.fromhex(fingerprint)]
    told = torch.zeros(1 + FINGERPRINT_BYTES, device=like.device)
    told[0] = not mine
    told[1 : 1 + len(mine)] = torch.tensor(mine)
    total = everyone.all_reduce(told.clone())
    return bool(total[0] == 0) and torch.equal(total, told * everyone.size)
