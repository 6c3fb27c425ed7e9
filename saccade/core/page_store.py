"""What KV pages in a folder depend on, and what their files are called. Knows nothing of what is in
a file.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from saccade.core.claims import Claim, made_beside
from saccade.core.store import FolderLayout

FORMAT = "saccade-page-1"
"""Changes whenever bytes of a page, or what they mean, change in a way that no other part of an
identity shows.
"""
SUFFIX = ".page"
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
    return name.hex() + SUFFIX


def remove_others(root: Path, identity: bytes) -> int:
    """Remove other identities' pages, unless a running server has the lock. Returns their number.

    Models served earlier keep nothing next to the present model.
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
