"""Memory for seen files: their headers, and the names of images' pixels. It is kept in memory, and,
where embeddings outlive the server, on disk beside them (`metadata_store.py`). Videos, the dearest
to open, and pixels go to disk. A header is believed only by the tenant whose bytes its reader had
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from cachetools import LRUCache

from saccade.core.types import Image, ImageKey
from saccade.ipc.messages import Same
from saccade.media.content import FASTEST_FILE, VIDEO, Probe, check_pixels
from saccade.media.metadata_store import MOST_ENTRIES, MetadataCache, MetadataStore
from saccade.media.opened import OpenedImage
from saccade.media.video import decoder_version


class SeenFiles:
    """Remember seen files. `folder` is for metadata that outlives the server, or `None`.
    `max_pixels` bounds an image or a frame.
    """

    def __init__(self, folder: Path | None, max_pixels: int) -> None:
        self.disk = MetadataStore(folder) if folder is not None else None
        self._max_pixels = max_pixels
        self._images: LRUCache[bytes, Probe] = LRUCache(MOST_ENTRIES)
        # 2: with `sound`; 3: with the orientation that the file asks for
        self._videos = MetadataCache(self.disk, f"video 3 {decoder_version()}", Probe)
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
            metadata.format == VIDEO and metadata.frames and 0 < metadata.fps < FASTEST_FILE
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
        if len(self._asked) + len(new) > MOST_ENTRIES:
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
