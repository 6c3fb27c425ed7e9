"""Options for uploaded files."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.claims import check_folder
from saccade.core.settings import FileSettings
from saccade.core.store import UPLOADS


@dataclass(frozen=True, slots=True)
class FileOptions(FileSettings):
    """Uploaded files."""

    def __post_init__(self) -> None:
        disk = self.disk
        if self.files_dir is not None and (disk.path or disk.nbytes is None):
            check_folder("--files-dir", disk.path, UPLOADS)
