"""KV pages on the device, and picture embeddings in their tiers. Owns the tensors; the scheduler
decides what lies in them.

Page 0 is the dummy page: nothing is ever read from it. Rows that only pad a batch write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.core.family import KVLayout
from saccade.core.plan import Move, Place
from saccade.core.types import ImageKey
from saccade.parallel import Shard
from saccade.runtime.disk import DiskTier


class KVMemory:
    """Keys and values of every page, one pair of tensors per layer: [pages * page_size, kv_heads,
    head_dim].
    """

    def __init__(
        self, layout: KVLayout, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        shape = (pages * page_size, layout.kv_heads, layout.head_dim)
        # empty, not zeros: untouched pages cost no memory on the CPU.
        self.layers: Sequence[tuple[torch.Tensor, torch.Tensor]] = tuple(
            (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(layout.layers)
        )


class EmbeddingMemory:
    """Embeddings of pictures by key, in every tier: [num_tokens, embedding_width] each, each in
    memory of its own.

    What comes from disk is read by the first rank and handed to the others.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        disk: DiskTier | None,
    ) -> None:
        self._device = device
        self._shard = shard
        self._disk = disk
        self._rows: dict[ImageKey, torch.Tensor] = {}
        self._ready: dict[
            ImageKey, torch.cuda.Event
        ] = {}  # of rows that are still being computed on another stream, or were
        self._host: dict[ImageKey, torch.Tensor] = {}
        self._none = torch.empty((0, width), dtype=dtype, device=device)

    def put(
        self, key: ImageKey, embedding: torch.Tensor, ready: torch.cuda.Event | None = None
    ) -> None:
        """Make an embedding, which owns its memory, resident on the device.

        `ready`: when another stream has computed it.
        """
        # A view would keep all of its buffer alive, or change when the buffer is used again.
        assert embedding.untyped_storage().nbytes() == embedding.nbytes, (
            "an embedding owns its memory"
        )
        self._rows[key] = embedding
        if ready is not None:
            self._ready[key] = ready

    def move(self, move: Move) -> None:
        """Carry out one move. Copies between host and device are in stream order."""
        key = move.key
        match move.source, move.target:
            case "device", None:
                del self._rows[key]
                self._ready.pop(key, None)
            case "device", "host":
                self._host[key] = self._to_host(self._use(key))
                del self._rows[key]
            case "host", None:
                del self._host[key]
            case "host", "device":
                self._rows[key] = self._host.pop(key).to(self._device, non_blocking=True)
            case "staged", "device":
                self._rows[key] = self._receive(move)
            case source, target:
                if self._disk is not None:
                    _move_on_disk(self._disk, key, source, target)

    def save(self, key: ImageKey) -> None:
        """Begin to write an embedding that is on the device to disk."""
        if self._disk is not None:
            self._disk.write(key, self._use(key).cpu())

    def gather(self, parts: Sequence[tuple[ImageKey, int, int]]) -> torch.Tensor:
        """Rows [offset, offset + length) of each (key, offset, length), back to back: [sum of
        lengths, width].
        """
        if not parts:
            return self._none
        rows = [self._use(key)[offset : offset + length] for key, offset, length in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _use(self, key: ImageKey) -> torch.Tensor:
        """The rows of an embedding on the device, for work on the current stream, which waits for
        them.
        """
        rows = self._rows[key]
        if (ready := self._ready.pop(key, None)) is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready)
            # Their memory is the other stream's: not to be used again before this one is done.
            rows.record_stream(stream)
        return rows

    def _to_host(self, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return rows
        return torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)

    def _receive(self, move: Move) -> torch.Tensor:
        """What the first rank has read; the others add nothing to it."""
        if self._disk is not None:
            rows = self._disk.take(move.key).to(self._device)
        else:
            rows = self._none.new_zeros((move.num_tokens, self._none.shape[1]))
        return self._shard.all_reduce(rows)


def _move_on_disk(disk: DiskTier, key: ImageKey, source: Place, target: Place | None) -> None:
    match source, target:
        case "disk", "staged":
            disk.read(key)
        case "disk", None:
            disk.remove(key)
        case "staged", None:
            disk.take(key)
        case _:
            raise AssertionError(f"no embedding goes from {source} to {target}")
