"""The interface of the tiers below the page pool. They store KV pages and states by hash."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from saccade.core.plan import PAGE_TIERS, PageTier


class PageTiers(Protocol):
    """Stores offloaded pages by page hash (`content.py`), in all tiers.

    identity: what the pages depend on (`PageIdentity.digest`).
    """

    identity: bytes

    def __contains__(self, name: object) -> bool:
        """Return True if any tier stores the page."""
        ...

    @property
    def tiers(self) -> Collection[PageTier]:
        """The tiers that have a budget."""
        ...

    @property
    def pinned(self) -> bool:
        """Return True if any page is pinned in any tier."""
        ...

    def write_page(
        self, name: bytes, page: int, line: int | None, tiers: Iterable[PageTier] = PAGE_TIERS
    ) -> int:
        """Write a page to each of `tiers` that does not store it yet. Return the number of bytes
        written.

        line: the slot with the recurrent state after the page, which is written too, or None.
        """
        ...

    def used(self, names: Sequence[bytes]) -> None:
        """Record a use of consecutive pages, which start with the first page of a sequence."""
        ...

    def pin(self, chain: Sequence[tuple[bytes, bool]], client: str, seconds: int) -> None:
        """Pin consecutive pages for a client for `seconds`.

        chain: for each page, its hash, and True if the state after it is stored too.
        """
        ...

    def hit(self, names: Sequence[bytes], client: str) -> None:
        """Renew a client's pins on consecutive pages, which start with the first page of a
        sequence.
        """
        ...
