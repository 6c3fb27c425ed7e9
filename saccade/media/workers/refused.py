"""Bytes refused for a while because they cost a worker, so that sending them again is free.

Each tenant has its own, since a worker's word on one tenant's bytes counts for that tenant alone.
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
