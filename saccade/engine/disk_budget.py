"""Computes how many bytes embeddings and KV pages may use on disk. Imported only if a directory is
set.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from saccade.core.claims import warn_of_others
from saccade.core.errors import ConfigError
from saccade.core.settings import DiskFolder
from saccade.core.store import EMBEDDING_FILES, PAGE_FILES, FolderLayout


def embedding_budget(disk: DiskFolder) -> tuple[int, str]:
    """Return the maximum bytes for embeddings, and the absolute path. Raises ConfigError."""
    return _budget("--embedding-cache-dir", disk, EMBEDDING_FILES)


def page_budget(disk: DiskFolder) -> tuple[int, str]:
    """Return the maximum bytes for KV pages, and the absolute path. Raises ConfigError."""
    return _budget("--kv-cache-dir", disk, PAGE_FILES)


def _budget(option: str, disk: DiskFolder, layout: FolderLayout) -> tuple[int, str]:
    """Create the directory. Return the maximum bytes that `option` may use in it, and its absolute
    path.

    Raises ConfigError.

    layout: identifies the files that are already stored there.
    """
    folder = Path(disk.path).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Files saved earlier count as available. Otherwise the budget would shrink at each restart.
        available = shutil.disk_usage(folder).free + layout.nbytes(folder)
    except FileExistsError:
        raise ConfigError(f"{option} {folder} is a file: set a directory") from None
    except OSError as error:
        raise ConfigError(f"{option} {folder}: {error.strerror}") from None
    warn_of_others(option, folder)
    return available // 4 if disk.nbytes is None else disk.nbytes, str(folder)
