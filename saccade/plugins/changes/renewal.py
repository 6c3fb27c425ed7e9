"""Loads new weights into a running network: another checkpoint of the same shape, from a directory
or from a single file, which may be shared memory.

The new network is loaded before the old one is released, so a failure has no effect. Both are in
memory for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.core.config import EngineConfig
from saccade.nn.protocol import FamilyNet
from saccade.parallel import Shard
from saccade.plugins.changes.agreement import UNDERSTOOD, agree, attempt
from saccade.runtime.changes import LoadNet


@dataclass(frozen=True, slots=True)
class Renewed:
    """The result of loading new weights."""

    net: FamilyNet | None = None
    digest: str = ""
    tower: bool = False  # whether the vision encoder has changed
    error: str = ""  # the reason if there is no network


@dataclass(frozen=True, slots=True)
class Renewal:
    """Loads new weights on one rank."""

    load: LoadNet
    folder: Path  # the current checkpoint
    digest: str  # the vision encoder's digest
    config: EngineConfig
    everyone: Shard

    def load_network(self, folder: Path, old: FamilyNet, like: torch.Tensor) -> Renewed:
        """Load the network in `folder`, which must have the shapes of `old`. All ranks must call
        this together.
        """
        made, error = attempt(folder, lambda: self.load(folder))
        net, now = made or (None, "")
        if net is not None and net.spec != old.spec:
            error = f"{folder}: its config.json, or another of its JSON files, differs"
        # Each rank has another shard, so only success is compared, not fingerprints.
        if not agree("" if error else UNDERSTOOD, like, self.everyone):
            error = error or f"{folder}: another rank could not read it"
        other = torch.tensor([float(now != self.digest)], device=like.device)
        tower = bool(self.everyone.all_reduce(other)[0])
        if not error and tower and self.config.embeddings.folder is not None:
            error = (
                "its vision encoder differs, and --embedding-cache-dir has embeddings of the old "
                "one"
            )
        return Renewed(error=error) if error else Renewed(net, now, tower)

    def refuses(self, *, graphs: bool, adapters: bool) -> str:
        """Return the reason why a server with these features cannot change its weights, or "" if it
        can.
        """
        if graphs:
            return "CUDA graphs reference the old weights: start with --disable-cuda-graph"
        if adapters:
            return "adapters add to the old weights: unload them first"
        if self.config.kv.pages.folder is not None:
            return "--kv-cache-dir keeps the KV of the old weights: start the server without it"
        if self.config.kv.scales:
            return (
                "the KV cache has the scales of the old weights: start with --kv-cache-dtype auto"
            )
        if self.config.encoder.role != "all":
            return (
                "other servers use the old vision encoder: weights can only be changed with "
                "--role all"
            )
        return ""
