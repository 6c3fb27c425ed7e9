"""New weights for a running network: another checkpoint with the same shape, from a folder, or from
one file, which may be shared memory.

The new network is complete before the old one is released, so an unreadable directory has no
effect. For a moment both take memory.
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
    """What came of loading new weights: the network and its digest, or why there is none."""

    net: FamilyNet | None = None
    digest: str = ""
    tower: bool = False  # the vision encoder is new
    error: str = ""  # the reason if there is none


@dataclass(frozen=True, slots=True)
class Renewal:
    """One rank's loader."""

    load: LoadNet
    folder: Path  # the present checkpoint's
    digest: str  # the vision encoder's
    config: EngineConfig
    everyone: Shard

    def load_network(self, folder: Path, old: FamilyNet, like: torch.Tensor) -> Renewed:
        """Load the network in `folder`. Every rank takes part."""
        made, error = attempt(folder, lambda: self.load(folder))
        net, now = made or (None, "")
        if net is not None and net.spec != old.spec:
            error = f"{folder}: its config.json, or another of its JSON files, differs"
        # Slices differ, so that only whether all could read is compared.
        if not agree("" if error else UNDERSTOOD, like, self.everyone):
            error = error or f"{folder}: another rank could not read it"
        other = torch.tensor([float(now != self.digest)], device=like.device)
        tower = bool(self.everyone.all_reduce(other)[0])
        if not error and tower and self.config.embeddings.folder is not None:
            error = "its vision encoder differs, and --embedding-cache-dir is the old one's"
        return Renewed(error=error) if error else Renewed(net, now, tower)

    def refuses(self, *, graphs: bool, adapters: bool) -> str:
        """Return the reason why the server's weights cannot change, or "" if they can."""
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
            return "other servers have the old vision tower: weights change with --role all"
        return ""
