"""The device's memory: KV pages and picture embeddings. Owns the tensors; the scheduler decides what lies in them.

Page 0 is the dummy page: nothing is ever read from it. Rows that only pad a batch write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.core.family import KVLayout
from saccade.core.types import ImageKey


class KVMemory:
    """Keys and values of every page, one pair of tensors per layer: [pages * page_size, kv_heads, head_dim]."""

    def __init__(self, layout: KVLayout, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        shape = (pages * page_size, layout.kv_heads, layout.head_dim)
        # empty, not zeros: untouched pages cost no memory on the CPU.
        self.layers: Sequence[tuple[torch.Tensor, torch.Tensor]] = tuple(
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)) for _ in range(layout.layers)
        )


class EmbeddingMemory:
    """Embeddings of pictures by key: [num_tokens, embedding_width] each."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows: dict[ImageKey, torch.Tensor] = {}
        self._none = torch.empty((0, width), dtype=dtype, device=device)

    def put(self, key: ImageKey, embedding: torch.Tensor) -> None:
        self._rows[key] = embedding

    def drop(self, key: ImageKey) -> None:
        del self._rows[key]

    def gather(self, parts: Sequence[tuple[ImageKey, int, int]]) -> torch.Tensor:
        """Rows [offset, offset + length) of each (key, offset, length), back to back: [sum of lengths, width]."""
        if not parts:
            return self._none
        rows = [self._rows[key][offset : offset + length] for key, offset, length in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())
