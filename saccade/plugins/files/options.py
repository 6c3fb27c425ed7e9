"""Options for uploaded files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.core.claims import Claim, check_folder
from saccade.core.settings import FileSettings
from saccade.plugins.files import BATCHES

UPLOADS = Claim(".saccade-files", re.compile(rf"lock|incoming|{BATCHES}|[0-9a-f]{{64}}"))
"""The directory of uploaded files, with a subdirectory for batches of requests."""


@dataclass(frozen=True, slots=True)
class FileOptions(FileSettings):
    """Uploaded files."""

    def __post_init__(self) -> None:
        disk = self.disk
        if self.files_dir is not None and (disk.path or disk.nbytes is None):
            check_folder("--files-dir", disk.path, UPLOADS)
