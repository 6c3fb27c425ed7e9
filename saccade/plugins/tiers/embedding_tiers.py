"""Opens those embedding tiers of one rank that the options enable."""

from __future__ import annotations

from pathlib import Path

import torch

from saccade.core.config import EmbeddingBudgets
from saccade.core.errors import StartupError
from saccade.core.plan import DiskEvent, Move
from saccade.core.types import ImageKey
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.host import Buffers, Unbuffered, open_buffers, open_host
from saccade.plugins.tiers.items import Embeddings
from saccade.plugins.tiers.store import Store, open_store
from saccade.runtime.tiers import EmbeddingTiers, Ready
from saccade.runtime.vision.streams import Copies


class StoredEmbeddings:
    """The disk tier of embeddings, which only rank 0 opens. Implements
    `runtime.tiers.EmbeddingStore`.
    """

    def __init__(self, store: Store[ImageKey], buffers: Buffers | Unbuffered) -> None:
        """Start the I/O thread.

        buffers: the buffers between the device and the disk, into which `store` reads.
        """
        self.found, self.shared = store.found, store.shared
        self._thread = Background(store)
        self._buffers = buffers

    @property
    def busy(self) -> bool:
        return self._thread.busy

    @property
    def has_events(self) -> bool:
        return self._thread.has_events

    def collect(self, wait: bool) -> tuple[DiskEvent, ...]:
        return self._thread.collect(wait)

    def close(self) -> None:
        self._thread.close()

    def save(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        """Start writing an embedding from the device to the disk."""
        try:
            copy, copied = self._buffers.fetch(rows, ready)
        except BufferError:
            self._thread.pass_over(key)
        else:
            if not self._thread.write(key, copy, copied):
                self._buffers.give_rows(copy)

    def move(self, move: Move) -> None:
        """Start a read or a removal, or drop rows that were read and are no longer needed."""
        match move.source, move.target:
            case "disk", "staged":
                self._thread.begin_read(move.key, move.num_tokens)
            case "disk", None:
                self._thread.remove(move.key)
            case "staged", None:
                self._buffers.give_rows(self._thread.take_rows(move.key))
            case source, target:
                raise AssertionError(f"no embedding goes from {source} to {target}")

    def bring(self, key: ImageKey) -> tuple[torch.Tensor, Ready]:
        """Start copying an embedding that was read from disk to the device.

        Returns its rows, and the event that marks the end of the copy.
        """
        return self._buffers.bring(self._thread.take_rows(key))


def open_tiers(
    budgets: EmbeddingBudgets, tower: str, like: torch.Tensor, rank: int
) -> EmbeddingTiers:
    """Open the tiers. Raises StartupError.

    tower: the vision encoder's fingerprint in hexadecimal.
    like: an empty tensor [0, width] with the embeddings' dtype and device.
    """
    folder, host_bytes = None if rank else budgets.folder, budgets.host_bytes
    copies = Copies(like.device) if like.is_cuda and (folder or host_bytes) else None
    host = open_host(host_bytes, like, copies) if host_bytes else None
    if folder is None:
        return EmbeddingTiers(host)
    buffers = open_buffers(like, copies)
    items = Embeddings(bytes.fromhex(tower), like.shape[1], like.dtype)
    try:
        store = open_store(budgets.store, Path(folder), items, buffers, budgets.disk_bytes)
    except OSError as error:
        option = "shared" if budgets.shared else "dir"
        raise StartupError(f"--embedding-cache-{option} {folder}: {error.strerror}") from None
    return EmbeddingTiers(host, StoredEmbeddings(store, buffers))
