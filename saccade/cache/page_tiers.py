"""The contract of the places beside the pool where KV pages and states are kept by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from saccade.core.plan import PAGE_TIERS, PageTier


class PageTiers(Protocol):
    """All tiers of kept pages. identity: see `core.store.PageIdentity`."""

    identity: bytes

    def __contains__(self, name: object) -> bool:
        """Return True if a tier has the page."""
        ...

    @property
    def tiers(self) -> Collection[PageTier]:
        """The tiers that have a budget."""
        ...

    @property
    def pinned(self) -> bool:
        """Return True with a pin in any tier."""
        ...

    def write_page(
        self, name: bytes, page: int, line: int | None, tiers: Iterable[PageTier] = PAGE_TIERS
    ) -> int:
        """Write `page`, and the state after it from `line`, to the tiers without them.

        Returns the bytes written.
        """
        ...

    def used(self, names: Sequence[bytes]) -> None:
        """Record a use of a chain, from its first page on."""
        ...

    def pin(self, chain: Sequence[tuple[bytes, bool]], client: str, seconds: int) -> None:
        """Pin a chain for a client for `seconds`. Each page has True if a state follows."""
        ...

    def hit(self, names: Sequence[bytes], client: str) -> None:
        """Renew a client's pins on a chain, from its first page on."""
        ...
