"""Options of the cache tiers in host memory and on disk."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.claims import check_folder
from saccade.core.errors import ConfigError
from saccade.core.settings import TierSettings
from saccade.core.store import PAGES, SHARED
from saccade.core.tuning import at_least


@dataclass(frozen=True, slots=True)
class TierOptions(TierSettings):
    """Image embeddings and KV in host memory, on disk, and in a store that servers share."""

    def __post_init__(self) -> None:
        at_least(0, self, "embedding_cache_host_mb", "kv_cache_host_mb")
        if (pages := self.kv_disk) is not None:
            check_folder("--kv-cache-dir", pages.path, PAGES)
            if pages.nbytes == 0:
                raise ConfigError(f"--kv-cache-dir {self.kv_cache_dir}: raise its size, or omit it")
        if (embeddings := self.embedding_disk) is not None:
            if not embeddings.path:
                raise ConfigError("--embedding-cache-dir: set a directory")
            check_folder("--embedding-cache-dir", embeddings.path, SHARED)
        elif self.embedding_cache_shared:
            raise ConfigError("--embedding-cache-shared: requires --embedding-cache-dir")
