"""Options for images by URL."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.given_paths import check_given
from saccade.core.settings import FetchSettings
from saccade.core.tuning import above, named


@dataclass(frozen=True, slots=True)
class FetchOptions(FetchSettings):
    """Images by URL."""

    allowed_media_domains: tuple[str, ...] = ()
    """Fetch images from this host only. Repeat the option for several. Default: any public host."""
    allow_private_media: bool = False
    """Also fetch images from private, loopback and link-local addresses."""
    allowed_local_media_path: str | None = None
    """Allow file: URLs below this folder."""

    def __post_init__(self) -> None:
        above(0, self, "fetch_timeout")
        named(self, "allowed_media_domains")
        if self.allowed_local_media_path is not None:
            check_given("--allowed-local-media-path", self.allowed_local_media_path, folder=True)
