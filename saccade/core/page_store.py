"""How KV pages lie in a folder: all that they depend on, a folder for each such identity, a file
for each. Start-up looks at the folder, the worker writes it. Knows nothing of what is in a file.
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

FORMAT = "saccade-page-1"
"""Changes whenever bytes of a page, or what they mean, change in a way that no other part of an
identity shows.
"""
SUFFIX = ".page"
PAGE_FILE = re.compile(r"[0-9a-f]{64}\.page")
PAGE_DRAFT = re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp")
"""One that is being written."""
IDENTITY_NAME = re.compile(r"kv-[0-9a-f]{32}")
PAGES = Claim(".saccade-pages", IDENTITY_NAME)
"""The folder of KV pages."""


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


def page_folders(root: Path) -> Iterator[Path]:
    """Yield the folders below `root` whose names are identities. Links are skipped."""
    for folder in root.iterdir():
        if IDENTITY_NAME.fullmatch(folder.name):
            with suppress(OSError), opened_folder(folder):
                yield folder


def kept_bytes(root: Path) -> int:
    """Return the disk bytes that pages below `root` take, over all identities."""
    total = 0
    for folder in page_folders(root):
        for path in folder.iterdir():
            if PAGE_FILE.fullmatch(path.name):
                with suppress(OSError):
                    total += path.lstat().st_blocks * 512
    return total


def remove_others(root: Path, identity: bytes) -> int:
    """Remove other identities' pages, unless a running server has the lock. Returns their number.

    Models served earlier keep nothing next to the present model.
    """
    count = 0
    for folder in page_folders(root):
        if folder.name == identity_folder(identity):
            continue
        with suppress(OSError), open(folder / "lock", "r+b", opener=made_beside) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in os.scandir(folder):
                if PAGE_FILE.fullmatch(entry.name) or PAGE_DRAFT.fullmatch(entry.name):
                    Path(entry).unlink()
                    count += 1
    return count
