"""An asyncio interface to uploaded files. It runs `store.py` on separate threads, with a time
limit.

If the directory does not respond (another process holds the lock, or a network file system is
offline), only requests for uploaded files have to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from mmap import mmap
from typing import BinaryIO, TypeVar

from saccade.core.errors import StorageBusy
from saccade.core.options import ServeOptions
from saccade.core.settings import FileSettings
from saccade.media.media import Media
from saccade.plugins.files.store import PIECE, FileStore, Stored

READERS = 4
"""Number of threads that read. There is one more thread for writes, which are serialized anyway."""
PATIENCE = 60.0
"""Maximum seconds to wait for the disk."""

T = TypeVar("T")


class Uploads:
    """Async versions of the store's methods. They raise the errors of these methods, and
    StorageBusy if a call takes longer than `PATIENCE`.
    """

    def __init__(self, store: FileStore) -> None:
        self.folder, self.budget = store.folder, store.budget
        self._store = store
        self._readers = ThreadPoolExecutor(READERS, "saccade-files")
        self._writer = ThreadPoolExecutor(1, "saccade-uploads")

    async def save(
        self,
        data: bytes | mmap,
        name: str,
        purpose: str,
        lifetime: int | None,
        owner: str = "",
        share: float = 1.0,
        suffix: str | None = None,
    ) -> Stored:
        save = partial(self._store.save, data, name, purpose, lifetime, owner, share, suffix)
        return await self._run(self._writer, save)

    async def delete(self, id: str, owner: str = "") -> None:
        await self._run(self._writer, partial(self._store.delete, id, owner))

    async def entries(self, owner: str = "") -> list[Stored]:
        return await self._run(self._readers, partial(self._store.entries, owner))

    async def find(self, id: str, owner: str = "") -> Stored:
        return await self._run(self._readers, partial(self._store.find, id, owner))

    async def find_content(self, name: str, owner: str = "") -> str | None:
        return await self._run(self._readers, partial(self._store.find_content, name, owner))

    async def read(self, id: str, owner: str = "") -> bytes:
        return await self._run(self._readers, partial(self._store.read, id, owner))

    async def open(self, id: str, owner: str = "") -> BinaryIO:
        return await self._run(self._readers, partial(self._store.open, id, owner))

    async def pieces(self, file: BinaryIO) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file from `open` in chunks."""
        while piece := await self._run(self._readers, partial(file.read, PIECE)):
            yield piece

    def close(self) -> None:
        """Accept no more calls, without waiting for those that are running."""
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(PATIENCE):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError:
            raise StorageBusy(
                f"the upload directory (--files-dir) did not respond for {PATIENCE:g} s: "
                "try again later"
            ) from None


def open_uploads(options: ServeOptions) -> Uploads:
    """Open the directory of uploaded files that the options name."""
    settings = options.of(FileSettings)
    return Uploads(FileStore(settings.folder, settings.nbytes))


def uploads_of(media: Media) -> Uploads:
    """Return the uploaded files that this plugin has opened for a server."""
    files = media.files
    assert isinstance(files, Uploads), "no other plugin brings uploads"
    return files
