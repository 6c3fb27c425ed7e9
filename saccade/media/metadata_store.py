"""Metadata: the few facts worth keeping about opened bytes, by digest, so that a seen file stays
closed. The facts are a header, a video's frames and pace, or a document's pages.

    MetadataCache    metadata of one kind, typed, in memory: the newest of them
    MetadataStore     metadata of all kinds in one database, in a folder of our own: outlives the
    server
    FileCache         what is known of seen files: their headers, and the names of images' pixels

An entry that cannot be read or written counts as missing: the worst cost is an opening. Entries
are believed only as far as the bytes themselves, since decoders check. A header is believed
only by the tenant whose bytes its reader had read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from blake3 import blake3
from cachetools import LRUCache

from saccade.core.claims import Claim
from saccade.core.decoders import msgpack_decoder
from saccade.core.types import Image, ImageKey
from saccade.core.video import MAX_FPS
from saccade.ipc.messages import Same
from saccade.media.content import VIDEO, Probe, check_pixels, video_reader
from saccade.media.opened import OpenedImage

log = logging.getLogger("saccade")

T = TypeVar("T")

CLAIM = Claim(".saccade-cards", re.compile(r"cards\.db(-journal)?"))
MAX_ENTRIES = 1 << 16
"""Of one kind in memory, and of all kinds on disk."""
LARGEST = 1 << 16
"""Bytes of an entry; a larger one stays in memory."""
SWEEP = 1 << 10
"""Entries written between two looks at how many there are."""
BUSY_SECONDS = 1.0
"""How long another server may hold the database."""


class MetadataStore:
    """Keep the metadata of `folder`. All work is on one thread. Errors are logged instead of
    raised, and end the use of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder
        self._thread = ThreadPoolExecutor(1, "saccade-cards")
        self._database: sqlite3.Connection | None = None
        self._written = 0

    def __bool__(self) -> bool:
        return self._folder is not None

    async def find(self, kind: str, name: bytes) -> bytes | None:
        """Return an entry's bytes, or `None` if missing."""
        (found,) = await self.find_all(kind, [name])
        return found

    async def find_all(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        """Return several entries' bytes in one look, `None` for each missing one."""
        if self._folder is None or not names:
            return [None] * len(names)

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            asked = "SELECT card FROM cards WHERE kind = ? AND name = ? AND length(card) <= ?"
            rows = (database.execute(asked, (kind, name, LARGEST)).fetchone() for name in names)
            return [row[0] if row and isinstance(row[0], bytes) else None for row in rows]

        work = self._thread.submit(self._with_database, read)
        return await asyncio.wrap_future(work) or [None] * len(names)

    def put(self, kind: str, name: bytes, entry: bytes) -> None:
        """Write an entry soon, unless it is larger than `LARGEST`."""
        if self._folder is None or len(entry) > LARGEST:
            return

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("REPLACE INTO cards VALUES (?, ?, ?)", (kind, name, entry))
                if self._written % SWEEP == 0:
                    newest = "(SELECT max(rowid) FROM cards)"
                    database.execute(
                        f"DELETE FROM cards WHERE rowid <= {newest} - ?", (MAX_ENTRIES,)
                    )
                self._written += 1

        self._thread.submit(self._with_database, write)

    def close(self) -> None:
        """Close the database once all entries are written."""
        self._thread.submit(self._shut)
        self._thread.shutdown()

    def _with_database(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            if self._database is None:
                self._database = self._open()
            return work(self._database) if self._database else None
        except (sqlite3.Error, OSError) as error:
            log.warning("ignoring the metadata in %s: %s", self._folder, error)
            self._shut()
            self._folder = None
            return None

    def _open(self) -> sqlite3.Connection | None:
        if self._folder is None:
            return None
        CLAIM.claim_folder(self._folder)
        file = self._folder / "cards.db"
        if file.is_symlink():
            raise OSError(f"{file.name} is a link")
        database = sqlite3.connect(file, timeout=BUSY_SECONDS, check_same_thread=False)
        self._database = database  # to be closed if the file is no database
        # An entry that is lost with the machine's power costs an opening.
        for pragma in ("trusted_schema = OFF", "journal_mode = TRUNCATE", "synchronous = OFF"):
            database.execute(f"PRAGMA {pragma}")
        database.execute(
            "CREATE TABLE IF NOT EXISTS cards "
            "(kind TEXT, name BLOB, card BLOB, PRIMARY KEY (kind, name))"
        )
        return database

    def _shut(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


class MetadataCache(Generic[T]):
    """Metadata of one kind. `kind` names their form and their maker, the decoder. Without `disk`,
    it is in memory alone.
    """

    def __init__(self, disk: MetadataStore | None, kind: str, form: type[T]) -> None:
        self._disk = disk
        self._kind = kind
        self._decoder = msgpack_decoder(form)
        self._entries: LRUCache[bytes, T] = LRUCache(MAX_ENTRIES)

    def get(self, name: bytes) -> T | None:
        """Return an entry in memory."""
        return self._entries.get(name)

    async def find(self, name: bytes) -> T | None:
        """Return an entry in memory or on disk."""
        found = self._entries.get(name)
        if found is None and self._disk:
            (found,) = await self.find_all([name])
        return found

    async def find_all(self, names: Sequence[bytes]) -> list[T | None]:
        """Return several entries on disk, in one look."""
        if self._disk is None:
            return [None] * len(names)
        written = await self._disk.find_all(self._kind, names)
        return [
            None if entry is None else self._read(name, entry)
            for name, entry in zip(names, written, strict=True)
        ]

    def _read(self, name: bytes, entry: bytes) -> T | None:
        try:
            found = self._entries[name] = self._decoder.decode(entry)
        except msgspec.MsgspecError:
            return None
        return found

    def put(self, name: bytes, entry: T) -> None:
        self._entries[name] = entry
        if self._disk is not None:
            self._disk.put(self._kind, name, msgspec.msgpack.encode(entry))


class FileCache:
    """Remember seen files. `folder` is for metadata that outlives the server, or `None`.
    `max_pixels` bounds an image or a frame.
    """

    def __init__(self, folder: Path | None, max_pixels: int) -> None:
        self.disk = MetadataStore(folder) if folder is not None else None
        self._max_pixels = max_pixels
        self._images: LRUCache[bytes, Probe] = LRUCache(MAX_ENTRIES)
        # 2: with `sound`; 3: with the orientation that the file asks for
        self._videos = MetadataCache(self.disk, f"video 3 {video_reader()}", Probe)
        self._same = MetadataCache(self.disk, "same pixels", Image)
        self._asked: set[ImageKey] = set()
        self._recalled: dict[ImageKey, Image] = {}

    async def find(self, digest: bytes, video: bool, tenant: str) -> Probe | None:
        """Return the header seen in these bytes, if any.

        Raises ImageError for a size beyond this server's limit.
        """
        if not video:
            return self.get(digest, tenant)
        metadata = await self._videos.find(_of_tenant(digest, tenant))
        if metadata is None or not (
            metadata.format == VIDEO and metadata.frames and 0 < metadata.fps < MAX_FPS
        ):
            return None
        check_pixels(metadata, self._max_pixels)
        return metadata

    def get(self, digest: bytes, tenant: str) -> Probe | None:
        """Return the header of a seen image, if any."""
        return self._images.get(_of_tenant(digest, tenant))

    def put(self, digest: bytes, video: bool, tenant: str, found: Probe) -> None:
        """Remember a header under the digest and the tenant.

        Raises ImageError for a size beyond this server's limit.
        """
        check_pixels(found, self._max_pixels)
        name = _of_tenant(digest, tenant)
        if video:
            self._videos.put(name, found)
        else:
            self._images[name] = found

    # ---- whose pixels an image has, which the engine finds and forgets when it ends

    def put_same(self, key: ImageKey, image: Image) -> None:
        if self.disk:
            self._same.put(_name(key), image)

    async def recall_same(self, opened: Sequence[OpenedImage]) -> None:
        """Look once for the name of these pixels in an earlier run's metadata."""
        new = [each.image.key for each in opened if each.image.key not in self._asked]
        if len(self._asked) + len(new) > MAX_ENTRIES:
            self._asked.clear()
        self._asked.update(new)
        found = await self._same.find_all([_name(key) for key in new])
        self._recalled |= {key: image for key, image in zip(new, found, strict=True) if image}

    def take_same(self, images: Sequence[Image]) -> Same:
        """Take the names recalled for these images, once."""
        if not self._recalled:
            return ()
        found = ((image.key, self._recalled.pop(image.key, None)) for image in images)
        return tuple((key, image) for key, image in found if image is not None)

    def close(self) -> None:
        """Close the disk once all is written."""
        if self.disk is not None:
            self.disk.close()


def _of_tenant(digest: bytes, tenant: str) -> bytes:
    return blake3(tenant.encode() + b"\0" + digest).digest() if tenant else digest


def _name(key: ImageKey) -> bytes:
    return key.digest + key.settings + key.salt.encode()
