"""Callbacks for changes to a cache. Register them with `PrefixCache.listen` or
`EmbeddingCache.listen`.
"""

from __future__ import annotations

from typing import Protocol

from saccade.cache.content import PageKey, Partition
from saccade.core.types import ImageKey


class PageListener(Protocol):
    """Gets changes to the KV pages on the device. `name` is the hash of a page (see
    `content.py`).
    """

    def page_stored(
        self, name: bytes, parent: bytes | None, key: PageKey, partition: Partition
    ) -> None:
        """A page was added to the prefix cache.

        parent: the hash of the page before it, or None for a first page.
        """
        ...

    def page_removed(self, name: bytes) -> None:
        """A page was removed from the prefix cache. All pages after it were removed earlier."""
        ...


class EmbeddingListener(Protocol):
    """Gets changes to the cached embeddings, in any tier."""

    def embedding_stored(self, key: ImageKey, num_tokens: int) -> None:
        """An embedding is cached in some tier, or its encoding has started."""
        ...

    def embedding_removed(self, key: ImageKey) -> None:
        """An embedding was removed from its last tier, or its encoding has failed."""
        ...
