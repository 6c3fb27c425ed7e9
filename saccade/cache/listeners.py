"""Events for changes to a cache (`PrefixCache.listen`, `EmbeddingCache.listen`)."""

from __future__ import annotations

from typing import Protocol

from saccade.cache.content import PageKey, Partition
from saccade.core.types import ImageKey


class PageListener(Protocol):
    """Hears of KV pages on the device. Names are those of `content.py`."""

    def page_stored(
        self, name: bytes, parent: bytes | None, key: PageKey, partition: Partition
    ) -> None:
        """Note a page that the prefix cache can find. parent: the page before it, if any."""
        ...

    def page_removed(self, name: bytes) -> None:
        """Note a page that has left the prefix cache. Pages after it left before."""
        ...


class EmbeddingListener(Protocol):
    """Hears of embeddings, in whatever tier."""

    def embedding_stored(self, key: ImageKey, num_tokens: int) -> None:
        """Note an embedding that is there, or being encoded."""
        ...

    def embedding_removed(self, key: ImageKey) -> None:
        """Note an embedding that has left every tier, or could not be encoded."""
        ...
