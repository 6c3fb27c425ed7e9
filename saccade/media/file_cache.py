"""Caches of metadata by digest, so that a file that was sent before is not opened again. Metadata
is an image's header, a video's frame count and frame rate, or the page sizes of a document.

    MetadataCache   metadata of one kind, typed, in memory: the most recently used entries
    MetadataStore   metadata of all kinds on disk, if enabled (`media/metadata_store.py`)
    FileCache       headers of files that were sent before, and which images have the same pixels

Decoders check metadata against the bytes, so an entry is trusted no more than the bytes themselves.
A header is reused only for the tenant that sent the bytes, because hostile bytes may have forged
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from blake3 import blake3
from cachetools import LRUCache

from saccade.core.decoders import msgpack_decoder
from saccade.core.types import Image, ImageKey
from saccade.core.video import MAX_FPS
from saccade.ipc.messages import Same
from saccade.media.content import VIDEO, Probe, check_pixels, video_reader
from saccade.media.opened import OpenedImage

if TYPE_CHECKING:
    from saccade.media.metadata_store import MetadataStore

T = TypeVar("T")

MAX_CACHED = 1 << 16
"""The maximum number of entries in memory, per kind."""


class MetadataCache(Generic[T]):
    """Caches metadata of one type in memory and, with a `disk`, in its database.

    kind: identifies the type of the entries and the version of the decoder that made them.
    form: the type of the entries.
    """

    def __init__(self, disk: MetadataStore | None, kind: str, form: type[T]) -> None:
        self._disk = disk
        self._kind = kind
        self._decoder = msgpack_decoder(form)
        self._entries: LRUCache[bytes, T] = LRUCache(MAX_CACHED)

    def get(self, name: bytes) -> T | None:
        """Return an entry in memory, or None."""
        return self._entries.get(name)

    async def find(self, name: bytes) -> T | None:
        """Return an entry in memory or on disk, or None."""
        found = self._entries.get(name)
        if found is None and self._disk:
            (found,) = await self.find_all([name])
        return found

    async def find_all(self, names: Sequence[bytes]) -> list[T | None]:
        """Load entries from disk in one database access. Missing entries are None in the result."""
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
    """Caches the headers of files that were sent before.

    folder: the directory for metadata that is kept across restarts, or None to keep none.
    max_pixels: the maximum size of an image, or of a frame of a video.
    """

    def __init__(self, folder: Path | None, max_pixels: int) -> None:
        self.disk = None if folder is None else _open_store(folder)
        self._max_pixels = max_pixels
        self._images: LRUCache[bytes, Probe] = LRUCache(MAX_CACHED)
        # The version of these entries: 2 added `sound`, 3 the display rotation.
        self._videos = MetadataCache(self.disk, f"video 3 {video_reader()}", Probe)
        self._same = MetadataCache(self.disk, "same pixels", Image)
        self._asked: set[ImageKey] = set()
        self._recalled: dict[ImageKey, Image] = {}

    async def find(self, digest: bytes, video: bool, tenant: str) -> Probe | None:
        """Return the cached header of the bytes with this digest, or None.

        Raises ImageError if the image exceeds this server's limit.
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
        """Return the cached header of the image with this digest, or None."""
        return self._images.get(_of_tenant(digest, tenant))

    def put(self, digest: bytes, video: bool, tenant: str, found: Probe) -> None:
        """Cache a header for the digest and the tenant.

        Raises ImageError if the image exceeds this server's limit.
        """
        check_pixels(found, self._max_pixels)
        name = _of_tenant(digest, tenant)
        if video:
            self._videos.put(name, found)
        else:
            self._images[name] = found

    # ---- images with the same pixels: the engine detects them, but does not store them on disk

    def put_same(self, key: ImageKey, image: Image) -> None:
        if self.disk:
            self._same.put(_name(key), image)

    async def recall_same(self, opened: Sequence[OpenedImage]) -> None:
        """Load, from disk, the known duplicates of these images: images that an earlier run of the
        server found to have the same pixels.

        Each image is looked up once. Call `take_same` to get the results.
        """
        new = [each.image.key for each in opened if each.image.key not in self._asked]
        if len(self._asked) + len(new) > MAX_CACHED:
            self._asked.clear()
        self._asked.update(new)
        found = await self._same.find_all([_name(key) for key in new])
        self._recalled |= {key: image for key, image in zip(new, found, strict=True) if image}

    def take_same(self, images: Sequence[Image]) -> Same:
        """Remove and return the duplicates of these images that `recall_same` has loaded."""
        if not self._recalled:
            return ()
        found = ((image.key, self._recalled.pop(image.key, None)) for image in images)
        return tuple((key, image) for key, image in found if image is not None)

    def close(self) -> None:
        """Wait until all entries are written to disk, and close the database."""
        if self.disk is not None:
            self.disk.close()


def _open_store(folder: Path) -> MetadataStore:
    from saccade.media.metadata_store import MetadataStore

    return MetadataStore(folder)


def _of_tenant(digest: bytes, tenant: str) -> bytes:
    return blake3(tenant.encode() + b"\0" + digest).digest() if tenant else digest


def _name(key: ImageKey) -> bytes:
    return key.digest + key.settings + key.salt.encode()
