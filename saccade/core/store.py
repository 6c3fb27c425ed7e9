"""The layout of embeddings, and of KV pages, in a folder: a folder for each model, a file for each.

It is the same for the engine that looks files up and the worker that writes them. Also the claims
to folders that servers may share, and what KV pages in a folder depend on.
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
"""One that several servers may find is being written."""

SHARED = Claim(".saccade-embeddings", re.compile(r"lock|cards|[0-9a-f]{32}"))
"""The folder of embeddings, of one server or shared by several."""
CARDS = "cards"
"""The folder beside these of what the front knows of files (`media/metadata_store.py`)."""
BATCHES = "batches"
UPLOADS = Claim(".saccade-files", re.compile(rf"lock|incoming|{BATCHES}|[0-9a-f]{{64}}"))
"""The folder of uploaded files, and of batches of requests in one below it."""


def file_name(key: ImageKey) -> str:
    """Return an embedding's file name, from digest, settings and salt. The model has the folder."""
    name = blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
    return name.hexdigest() + SUFFIX


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """Names below a claimed folder.

    folder: one for each model. file: one for each item. draft: one that is being written, in a
    folder of one server.
    """

    claim: Claim
    folder: re.Pattern[str]
    file: re.Pattern[str]
    draft: re.Pattern[str]

    def folders(self, root: Path) -> Iterator[tuple[Path, int]]:
        """Yield the models' folders below `root`, each with an open descriptor.

        Links are skipped.
        """
        for folder in root.iterdir():
            if self.folder.fullmatch(folder.name):
                with suppress(OSError), opened_folder(folder) as handle:
                    yield folder, handle

    def nbytes(self, root: Path) -> int:
        """Return the disk bytes that items below `root` use, over all models."""
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
    """Return the disk bytes for a file with `nbytes` bytes."""
    return max(1, -(-nbytes // DISK_BLOCK)) * DISK_BLOCK


def taken(found: os.stat_result) -> int:
    """Return the disk bytes that a file takes. Holes take 0, whatever size the file states."""
    return min(on_disk(found.st_size), 512 * found.st_blocks)


FORMAT = "saccade-page-1"
"""Changes whenever bytes of a page, or what they mean, change in a way that no other part of an
identity shows.
"""
PAGE_SUFFIX = ".page"
PAGES = Claim(".saccade-pages", re.compile(r"kv-[0-9a-f]{32}"))
"""The folder of KV pages."""
PAGE_FILES = FolderLayout(
    PAGES,
    PAGES.names,
    re.compile(r"[0-9a-f]{64}\.page"),
    re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp"),
)


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What any page's keys and values depend on, apart from the prompt.

    weights: a digest over the checkpoint's files, its configuration (rope, too) included. adapter:
    a reserved field, so far empty. computed: how the weights are computed with (device, dtype,
    quantisation, family options). layout: each layer's caches as one rank has them, and how many
    ranks. kept: the cache's number format and scales.
    """

    weights: str
    computed: str
    kept: str
    layout: str
    page_size: int
    adapter: str = ""
    release: str = ""

    def digest(self) -> bytes:
        """Compute a 16-byte digest."""
        return blake2b(repr((FORMAT, self)).encode(), digest_size=16).digest()


def identity_folder(identity: bytes) -> str:
    return f"kv-{identity.hex()}"


def page_file(name: bytes) -> str:
    return name.hex() + PAGE_SUFFIX


def remove_others(root: Path, identity: bytes) -> int:
    """Remove other identities' pages, unless a running server has the lock. Returns their number.

    Pages of models served earlier are removed.
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
