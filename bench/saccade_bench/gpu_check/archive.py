"""Copy the results of a check to the output directory: the report, the summary, and an archive of
everything else. Each file is replaced atomically, so that a kill at any time leaves it intact.
"""

from __future__ import annotations

import io
import tarfile
import threading
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

NAME = "results.tar.gz"
PIECE_BYTES = 1 << 16
BESIDE = ("report.md", "summary.json")
"""Files that are also copied outside the archive."""
EVERY_SECONDS = 5.0
MAX_BYTES = 4 << 20
"""Maximum size per file, because outputs are limited. Only the end of a longer file is kept."""


class Archive:
    """Context manager that copies `folder` to `out` periodically and on exit.

    `out` has at most one temporary file per result. `refresh` creates the report in the folder. Its
    errors are printed once and otherwise ignored.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        refresh: Callable[[Path], None],
        every: float = EVERY_SECONDS,
    ) -> None:
        self._folder = folder
        self._out = out
        self._refresh = refresh
        self._every = every
        self._said: set[str] = set()
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
        """Copy everything that exists now. After it returned, a kill does not lose it."""
        with self._lock:
            self._attempt(lambda: self._refresh(self._folder))
            self._attempt(self._copy)  # can fail if the disk is temporarily full

    def _copy(self) -> None:
        self._replace(NAME, pack(self._folder))
        for name in BESIDE:
            if (path := self._folder / name).is_file():
                self._replace(name, path.read_bytes())

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._tell(traceback.format_exc())

    def _tell(self, said: str) -> None:
        if said not in self._said:
            self._said.add(said)
            print(said, flush=True)

    def _replace(self, name: str, content: bytes) -> None:
        new = self._out / f"{name}.new"
        new.write_bytes(content)
        new.replace(self._out / name)

    def _repeat(self) -> None:
        while not self._over.wait(self._every):
            self.write()


def pack(folder: Path) -> bytes:
    """Pack the files of a folder into an archive, smallest first, because these can still be read
    if the archive is truncated. Other processes may be writing to the files.
    """
    found = []
    for path in folder.rglob("*"):
        try:
            # Read once, because the file may grow meanwhile.
            found.append((path.read_bytes()[-MAX_BYTES:], path, path.stat().st_mtime))
        except (FileNotFoundError, IsADirectoryError):
            continue
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz", compresslevel=6) as archive:
        for content, path, written in sorted(found, key=lambda each: len(each[0])):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mtime = len(content), written
            archive.addfile(entry, io.BytesIO(content))
    return memory.getvalue()


def unpack_into(packed: bytes, folder: Path) -> None:
    """Extract the readable part of an archive that may be truncated: all complete files, and the
    start of the last one.
    """
    gzip, pieces = zlib.decompressobj(wbits=31), list[bytes]()
    with suppress(zlib.error):
        for start in range(0, len(packed), PIECE_BYTES):
            pieces.append(gzip.decompress(packed[start : start + PIECE_BYTES]))
    content = b"".join(pieces)
    with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(content), mode="r:") as files:
        for each in files:
            name = Path(each.name).name
            begin = each.offset_data
            (folder / name).write_bytes(content[begin : begin + each.size])
