"""How embeddings lie in a folder: a folder for each model, a file for each embedding. The engine
looks whether one is there, and the worker that writes it agrees. Knows nothing of what is in it.
Also the claims to folders that servers may share, which start-up and their owners look at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from saccade.core.claims import Claim, opened_folder
from saccade.core.config import DISK_BLOCK
from saccade.core.types import ImageKey

SUFFIX = ".safetensors"
DRAFT = ".draft"
WHOLE_NAME = re.compile(r"[0-9a-f]{40}\.safetensors")
DRAFT_NAME = re.compile(r"\.[0-9a-f]{16}\.draft")
"""One that several servers may find is being written."""
LONE_DRAFT_NAME = re.compile(r"[0-9a-f]{40}\.[0-9]+\.tmp")
"""The same in a folder of one server."""
MODEL_NAME = re.compile(r"[0-9a-f]{32}")

SHARED = Claim(".saccade-embeddings", re.compile(r"lock|[0-9a-f]{32}"))
"""The folder of embeddings that several servers share."""
UPLOADS = Claim(".saccade-files", re.compile(r"lock|incoming|[0-9a-f]{64}"))
"""The folder of uploaded files."""


def file_name(key: ImageKey) -> str:
    """By digest, settings and salt; the folder it lies in is the model's."""
    name = blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
    return name.hexdigest() + SUFFIX


def model_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """Those below `root` that models have by their names, each with an open descriptor. A link is
    none.
    """
    for folder in root.iterdir():
        if MODEL_NAME.fullmatch(folder.name):
            with suppress(OSError), opened_folder(folder) as handle:
                yield folder, handle


def stored_bytes(root: Path) -> int:
    """What the embeddings below `root`, of all models, take of the disk."""
    total = 0
    for _, handle in model_folders(root):
        for file in os.scandir(handle):
            if WHOLE_NAME.fullmatch(file.name):
                with suppress(FileNotFoundError):  # another server may have removed it
                    total += taken(file.stat(follow_symlinks=False))
    return total


def on_disk(nbytes: int) -> int:
    """What a file of `nbytes` takes of a disk."""
    return max(1, -(-nbytes // DISK_BLOCK)) * DISK_BLOCK


def taken(found: os.stat_result) -> int:
    """What a file takes of a disk, were its size said to be more: of holes nothing is there."""
    return min(on_disk(found.st_size), 512 * found.st_blocks)
