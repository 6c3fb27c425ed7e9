"""The tiers of embeddings that a server's options ask for, opened on one rank. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.core.config import EmbeddingBudgets
from saccade.core.errors import StartupError
from saccade.core.types import ImageKey
from saccade.runtime.tiers.background import Background
from saccade.runtime.tiers.host import UNBUFFERED, Buffers, Unbuffered, open_buffers, open_host
from saccade.runtime.tiers.items import Embeddings
from saccade.runtime.tiers.tier import Tier, open_store
from saccade.runtime.vision.streams import Copies


@dataclass(frozen=True, slots=True)
class EmbeddingTiers:
    """Each is `None` where it is off. disk: the first rank's alone. buffers: between device and
    disk.
    """

    host: Tier[ImageKey] | None = None
    disk: Background[ImageKey] | None = None
    buffers: Buffers | Unbuffered = UNBUFFERED


NO_TIERS = EmbeddingTiers()


def open_tiers(
    budgets: EmbeddingBudgets, tower: str, like: torch.Tensor, rank: int
) -> EmbeddingTiers:
    """Open the tiers. tower: its fingerprint. like: [0, width], on the device.

    Raises StartupError.
    """
    stored = budgets.folder is not None and not rank
    if not (budgets.host_bytes or stored):
        return NO_TIERS
    copies = Copies(like.device) if like.is_cuda else None
    host = open_host(budgets.host_bytes, like, copies) if budgets.host_bytes else None
    if budgets.folder is None or rank:
        return EmbeddingTiers(host)
    buffers = open_buffers(like, copies)
    items = Embeddings(bytes.fromhex(tower), like.shape[1], like.dtype)
    try:
        root = Path(budgets.folder)
        store = open_store(budgets.store, root, items, buffers, budgets.disk_bytes)
    except OSError as error:
        option = "shared" if budgets.shared else "dir"
        raise StartupError(
            f"--embedding-cache-{option} {budgets.folder}: {error.strerror}"
        ) from None
    return EmbeddingTiers(host, Background(store), buffers)
