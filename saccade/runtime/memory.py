"""Stores KV pages and image embeddings in device memory, and moves embeddings to other cache tiers.

The scheduler decides what is stored. `states.py` stores the states of linear attention. KV page 0
is a dummy page. Padding rows write to it, and it is never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from saccade.core.family import Cache, KVSpec
from saccade.core.plan import FreeMemory, Move
from saccade.core.types import ImageKey
from saccade.ipc.memory import release_pages, resident_bytes, trim
from saccade.parallel import Shard
from saccade.runtime.attention import KVCache
from saccade.runtime.tiers import NO_TIERS, EmbeddingTiers, Ready, Tier

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = {
    "float32": torch.float32,
    "int8": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
}

Caches = tuple[Mapping[str, torch.Tensor], ...]
"""For each layer, the cached values per token, by name: [pages * page_size, *shape]."""


def allocate_caches(
    spec: KVSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Allocate and return the per-token tensors of `spec`, for all KV pages."""

    def make(cache: Cache) -> torch.Tensor:
        kind = dtype if cache.format == "model" else FORMATS[cache.format]
        # torch.empty instead of zeros, so that unused pages take no physical memory on a CPU.
        return torch.empty((pages * page_size, *cache.shape), dtype=kind, device=device)

    return tuple(
        {cache.name: make(cache) for cache in layer if cache.per == "token"}
        for layer in spec.layers
    )


def keys_and_values(caches: Caches) -> KVCache:
    """Return the key and value tensors by layer.

    In a layer with latents (MLA), one tensor is both the keys and the values.
    """
    pairs = ((layer.get("k"), layer.get("v")) for layer in _as_pairs(caches))
    return {i: (k, v) for i, (k, v) in enumerate(pairs) if k is not None and v is not None}


def _as_pairs(caches: Caches) -> Iterator[Mapping[str, torch.Tensor]]:
    for layer in caches:
        latent = layer.get("latent")
        yield layer if latent is None else {"k": latent, "v": latent}


def return_free(caches: Iterable[torch.Tensor], pages: int, free: FreeMemory) -> int:
    """Return the memory of free KV pages to the operating system.

    Returns the number of bytes that were released.

    caches: tensors that each have `pages` pages.
    """
    before = resident_bytes()
    for cache in caches:
        each = cache.nbytes // pages
        # empty while asleep
        for first, count in free.pages if cache.untyped_storage().nbytes() else ():
            release_pages(cache.data_ptr() + first * each, count * each)
    freed = max(0, before - resident_bytes())
    trim()
    return freed


class EmbeddingMemory:
    """Stores image embeddings by key: [num_tokens, embedding_width], each in separate memory.

    Copies run in the background. Only rank 0 reads from disk. It broadcasts to the other ranks.
    """

    def __init__(self, like: torch.Tensor, shard: Shard, tiers: EmbeddingTiers = NO_TIERS) -> None:
        """Start without embeddings.

        like: an empty tensor [0, width] with the embeddings' dtype and device.
        """
        self._shard = shard
        self._host = tiers.host
        self._disk = tiers.disk
        self._rows: dict[ImageKey, torch.Tensor] = {}
        # For embeddings computed on another stream, the event to wait for before their first use.
        self._ready: dict[ImageKey, torch.cuda.Event] = {}
        self._unsaved: set[ImageKey] = set()  # to save once they are encoded
        self.none = like

    def __len__(self) -> int:
        """Return the number of embeddings on the device."""
        return len(self._rows)

    def put(
        self, key: ImageKey, embedding: torch.Tensor, ready: torch.cuda.Event | None = None
    ) -> None:
        """Store an embedding on the device. It must not be a view of other memory.

        ready: the event that is recorded once another stream has computed the embedding, or None.
        """
        # A view would keep its entire buffer alive, or change when the buffer is reused.
        assert embedding.untyped_storage().nbytes() == embedding.nbytes, (
            "an embedding owns its memory"
        )
        self._keep(key, embedding, ready)
        if key in self._unsaved:
            self._unsaved.remove(key)
            self.save(key)

    def move(self, move: Move) -> None:
        """Move one embedding between tiers, or delete it.

        Copies between host and device are in stream order.
        """
        key = move.key
        match move.source, move.target:
            case "device", None:
                del self._rows[key]
                self._ready.pop(key, None)
            case "staged", "device":
                self._receive(move)
            case ("host", _) | (_, "host"):
                assert self._host is not None, "there is no host tier"
                self._move_on_host(self._host, move)
            case _:
                if self._disk is not None:
                    self._disk.move(move)

    def save(self, key: ImageKey) -> None:
        """Start writing an embedding to disk. If it is not on the device yet, `put` starts the
        write.
        """
        if self._disk is None:
            return
        if key not in self._rows:
            self._unsaved.add(key)
        else:
            self._disk.save(key, self._rows[key], self._ready.get(key))

    def gather(self, parts: Sequence[tuple[ImageKey, int, int]]) -> torch.Tensor:
        """Return rows of embeddings, concatenated to [sum of lengths, width].

        parts: (key, offset, length) for each range of rows.
        """
        rows = [self._use(key)[offset : offset + length] for key, offset, length in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def read(self, key: ImageKey, num_tokens: int) -> torch.Tensor:
        """Return an embedding from the device or from the host, without moving it."""
        if key in self._rows:
            return self._use(key)
        assert self._host is not None, "there is no host tier"
        rows, ready = self._host.get(key, num_tokens)
        if ready is not None:
            stream = torch.cuda.current_stream(rows.device)
            stream.wait_event(ready)
            rows.record_stream(stream)
        return rows

    def _keep(self, key: ImageKey, rows: torch.Tensor, ready: Ready) -> None:
        self._rows[key] = rows
        if ready is not None:
            self._ready[key] = ready

    def _use(self, key: ImageKey) -> torch.Tensor:
        """Return an embedding's rows, and make the current stream wait until they are computed."""
        rows = self._rows[key]
        if (ready := self._ready.pop(key, None)) is not None:
            stream = torch.cuda.current_stream(rows.device)
            stream.wait_event(ready)
            # The other stream allocated the memory. It must not be reused before this one is done.
            rows.record_stream(stream)
        return rows

    def _receive(self, move: Move) -> None:
        """Move an embedding that was read from disk to the device, and broadcast it to all
        ranks.
        """
        key = move.key
        if self._disk is None:
            self._keep(key, self.none.new_empty((move.num_tokens, self.none.shape[1])), None)
        else:
            self._keep(key, *self._disk.bring(key))
        if self._shard.size > 1:
            self._rows[key] = self._shard.broadcast(self._use(key))

    def _move_on_host(self, host: Tier[ImageKey], move: Move) -> None:
        key = move.key
        if move.source == "device":
            host.put(key, self._rows.pop(key), self._ready.pop(key, None))
            return
        if move.target == "device":
            self._keep(key, *host.get(key, move.num_tokens))
        host.drop(key)
