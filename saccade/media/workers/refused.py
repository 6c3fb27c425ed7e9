"""Bytes refused for a while because they cost a worker, so that whoever sends them again costs
nothing.

Each tenant has its own: what a worker says of one tenant's bytes is no other's concern.
"""

from __future__ import annotations

from cachetools import TTLCache

from saccade.core.errors import ImageError

REFUSED = 1 << 12
REFUSED_SECONDS = 600.0
"""How many are remembered, and for how long."""


class RefusedBytes:
    """Refusals by tenant, digest and use."""

    def __init__(self) -> None:
        self._why: TTLCache[tuple[str, bytes, str], tuple[str, str | None]] = TTLCache(
            REFUSED, REFUSED_SECONDS
        )

    def add(self, tenant: str, digest: bytes, error: ImageError, use: str = "") -> None:
        self._why[tenant, digest, use] = error.message, error.code

    def check(self, tenant: str, digest: bytes, use: str = "") -> None:
        """Raise ImageError, as reported before."""
        if found := self._why.get((tenant, digest, use)):
            message, code = found
            raise ImageError(message, code=code)
