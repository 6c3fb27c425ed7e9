"""The layout of embeddings and KV pages on disk: a directory for each model, and a file for each
embedding or page.

The engine, which looks files up, and the worker, which writes them, share this layout.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from saccade.core.claims import Claim, made_beside, opened_folder
from saccade.core.config import DISK_BLOCK
from saccade.core.types import ImageKey

SUFFIX = ".safetensors"
DRAFT = ".draft"
DRAFT_NAME = re.compile(r"\.[0-9a-f]{16}\.draft")
"""Matches the name of a file that is still being written, in a directory that several servers may
use.
"""

SHARED = Claim(".saccade-embeddings", re.compile(r"lock|cards|[0-9a-f]{32}"))
"""Reserves a directory of embeddings, which one or several servers use."""
CARDS = "cards"
"""Name of the subdirectory of `SHARED` with the front end's metadata of media files
(`media/metadata_store.py`).
"""


def file_name(key: ImageKey) -> str:
    """Return the name of the file with an embedding. Each model has a separate directory of such
    files.
    """
    name = blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
    return name.hexdigest() + SUFFIX


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """Patterns of the names in a reserved directory: directories of models, and files in them."""

    claim: Claim
    folder: re.Pattern[str]  # a model's directory
    file: re.Pattern[str]  # a file with an embedding or a page
    draft: re.Pattern[str]  # a file that is being written, if the directory is not shared

    def folders(self, root: Path) -> Iterator[tuple[Path, int]]:
        """Yield the path and an open descriptor of each model's directory below `root`. Symbolic
        links are skipped.
        """
        for folder in root.iterdir():
            if self.folder.fullmatch(folder.name):
                with suppress(OSError), opened_folder(folder) as handle:
                    yield folder, handle

    def nbytes(self, root: Path) -> int:
        """Return the disk space that the files of all models below `root` use, in bytes."""
        total = 0
        for _, handle in self.folders(root):
            for file in os.scandir(handle):
                if self.file.fullmatch(file.name):
                    with suppress(FileNotFoundError):  # another server may have removed it
                        total += taken(file.stat(follow_symlinks=False))
        return total


EMBEDDING_FILES = FolderLayout(
    SHARED,
    re.compile(r"[0-9a-f]{32}"),
    re.compile(r"[0-9a-f]{40}\.safetensors"),
    re.compile(r"[0-9a-f]{40}\.[0-9]+\.tmp"),
)


def on_disk(nbytes: int) -> int:
    """Return the disk space, in bytes, of a file with `nbytes` bytes."""
    return max(1, -(-nbytes // DISK_BLOCK)) * DISK_BLOCK


def taken(found: os.stat_result) -> int:
    """Return the disk space that a file uses, in bytes. Holes in a sparse file are not counted."""
    return min(on_disk(found.st_size), 512 * found.st_blocks)


PAGE_SUFFIX = ".page"
PAGES = Claim(".saccade-pages", re.compile(r"kv-[0-9a-f]{32}"))
"""Reserves a directory of KV pages, which one server uses."""
PAGE_FILES = FolderLayout(
    PAGES,
    PAGES.names,
    re.compile(r"[0-9a-f]{64}\.page"),
    re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp"),
)


def identity_folder(identity: bytes) -> str:
    return f"kv-{identity.hex()}"


def page_file(name: bytes) -> str:
    return name.hex() + PAGE_SUFFIX


def remove_others(root: Path, identity: bytes) -> int:
    """Remove the KV pages of all identities except `identity`, such as those of models served
    earlier.

    Directories that a running server has locked are skipped. Returns the number of pages removed.
    """
    count = 0
    for folder, _ in PAGE_FILES.folders(root):
        if folder.name == identity_folder(identity):
            continue
        with suppress(OSError), open(folder / "lock", "r+b", opener=made_beside) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in os.scandir(folder):
                if PAGE_FILES.file.fullmatch(entry.name) or PAGE_FILES.draft.fullmatch(entry.name):
                    Path(entry).unlink()
                    count += 1
    return count
