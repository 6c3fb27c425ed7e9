"""The results of a check where they are wanted: the report, its figures, and everything else in one
archive, each replaced as a whole, so that what ends the check at any moment ends no file.

Knows nothing of what lies in the folder that it copies.
"""

from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from typing import Self

NAME = "results.tar.gz"
BESIDE = ("report.md", "summary.json")
"""Files that are also to be read without unpacking."""
EVERY_SECONDS = 15.0


class Archive:
    """`with`: `folder` is copied to `out` every so often, and at the end. At most twice as many
    files as have names here lie there.
    """

    def __init__(self, folder: Path, out: Path, every: float = EVERY_SECONDS) -> None:
        self._folder = folder
        self._out = out
        self._every = every
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="archive")

    def __enter__(self) -> Self:
        self._out.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.write()

    def write(self) -> None:
        """All that is there now. On return a kill takes nothing of it back."""
        with self._lock:
            self._replace(NAME, pack(self._folder))
            for name in BESIDE:
                if (path := self._folder / name).is_file():
                    self._replace(name, path.read_bytes())

    def _replace(self, name: str, content: bytes) -> None:
        new = self._out / f"{name}.new"
        new.write_bytes(content)
        new.replace(self._out / name)

    def _repeat(self) -> None:
        while not self._over.wait(self._every):
            self.write()


def pack(folder: Path) -> bytes:
    """The files of a folder as an archive. Others may be writing to them."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz", compresslevel=6) as archive:
        for path in sorted(folder.rglob("*")):
            try:
                content = path.read_bytes()  # as long as it is now: it may grow meanwhile
                written = path.stat().st_mtime
            except (FileNotFoundError, IsADirectoryError):
                continue
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mtime = len(content), written
            archive.addfile(entry, io.BytesIO(content))
    return memory.getvalue()
