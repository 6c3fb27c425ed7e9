"""The kinds of media that a request may contain. This module has the protocol that each kind
implements, the kind for still images, and `MediaKinds`, which imports a kind when it is first used.

For each source, these methods are called in order:

    check        reject what the model or the options forbid, before anything is fetched
    begin_reads  start fetching the source's bytes
    metadata     read digests and sizes from the bytes, without decoding pixels
    units        compute the images that the model sees, with a key and a cost for each
    pixels       return the decode jobs for one of these images
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.media.content import identify_soon
from saccade.media.opened import CachedFrame, Kind, OpenedImage, jobs_of
from saccade.media.sources.source import ImageSource, RenderedPage, SentFile, Source
from saccade.media.sources.source_reader import Reads, SourceRead
from saccade.media.workers.decode_queue import Job, PixelLimits
from saccade.media.workers.fork_server import ForkServers
from saccade.media.workers.pool import DecodePool
from saccade.plugin import MediaCard

if TYPE_CHECKING:
    from saccade.media.metadata_store import MetadataStore

S_contra = TypeVar("S_contra", contravariant=True)
C = TypeVar("C")
U_co = TypeVar("U_co", covariant=True)


class MediaKind(Protocol[S_contra, C, U_co]):
    """Reads one kind of media. Methods raise errors without `param`, which `Media` adds."""

    def check(self, source: S_contra) -> None:
        """Raise InvalidRequest if this model or this installation does not support the source."""
        ...

    def begin_reads(self, source: S_contra, reads: Reads) -> None:
        """Start to read a source. The reads are shared with sources of the request that have the
        same bytes.
        """
        ...

    async def metadata(self, source: S_contra, reads: Reads) -> C:
        """Return the metadata of a source's bytes. Raises ImageError, TooLarge, NotFound."""
        ...

    async def units(self, source: S_contra, metadata: C, reads: Reads) -> U_co:
        """Return the images of a source that the model sees, with their keys and costs.

        Raises ImageError, InvalidRequest.
        """
        ...

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Return a decode job for each of an image's frames, or None if its bytes were dropped."""
        ...

    def forget(self) -> None:
        """Release all cached pixels."""
        ...

    async def close(self) -> None: ...


AnyKind = MediaKind[Any, Any, Any]
CARDS = (
    MediaCard("still", "saccade.media.kind:Stills"),
    MediaCard("region", "saccade.media.regions:Regions"),
)
HEAD_BYTES = 1024
"""A file's signature is searched for in this many bytes at its start, as PDF readers do."""
IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
"""Magic numbers of common image formats."""


@dataclass(frozen=True, slots=True, eq=False)
class KindContext:
    """What the constructor of every kind of media gets."""

    spec: FamilySpec
    options: ServeOptions
    metrics: Metrics
    limits: PixelLimits
    pool: DecodePool
    disk: MetadataStore | None  # persistent metadata, if enabled
    fork_servers: ForkServers | None
    kinds: MediaKinds


class MediaKinds:
    """Finds the kind of media of a source. Kinds are imported when they are first used."""

    def __init__(
        self,
        spec: FamilySpec,
        options: ServeOptions,
        metrics: Metrics,
        limits: PixelLimits,
        pool: DecodePool,
        disk: MetadataStore | None,
        fork_servers: ForkServers | None,
        cards: Iterable[MediaCard],
    ) -> None:
        """Store the context that kinds are built from.

        cards: describe the kinds that plugins add.
        """
        self._context = KindContext(spec, options, metrics, limits, pool, disk, fork_servers, self)
        self._cards = {card.kind: card for card in (*CARDS, *cards)}
        self._built: dict[str, AnyKind] = {}

    def __getitem__(self, kind: str) -> AnyKind:
        if kind not in self._built:
            self._built[kind] = resolve_name(self._cards[kind].build)(self._context)
        return self._built[kind]

    def of(self, source: Source | SentFile) -> AnyKind:
        """Return the kind of a source. Raises InvalidRequest if no enabled plugin provides it."""
        if source.kind not in self._cards:
            raise InvalidRequest(
                f"{source.param}: this server does not support {source.kind}s: send images instead",
                source.param,
                "unsupported_parameter",
            )
        return self[source.kind]

    def of_bytes(self, data: bytes) -> str | None:
        """Return the kind whose signature the file has.

        Returns None for images and for files that no kind recognizes.
        """
        if data.startswith(IMAGES):
            return None
        head = data[:HEAD_BYTES]
        for card in self._cards.values():
            if head.startswith(card.starts) or any(mark in head for mark in card.marks):
                return card.kind
        return None

    def readable(self) -> Iterator[Any]:
        """Yield the media types that plugins' kinds support with this model and installation."""
        for card in self._cards.values():
            if card.readable:
                yield from resolve_name(card.readable)(self._context.spec)

    def forget(self) -> None:
        """Release all cached pixels."""
        for kind in self._built.values():
            kind.forget()

    async def close(self) -> None:
        for kind in self._built.values():
            await kind.close()


class Stills:
    """Reads still images, and pages of documents once they are rendered."""

    def __init__(self, context: KindContext) -> None:
        self._spec = context.spec
        self._limits = context.limits

    def check(self, source: ImageSource) -> None:
        """Do nothing: a model with vision supports all still images."""

    def begin_reads(self, source: ImageSource, reads: Reads) -> None:
        reads.read_source(source.url)

    async def metadata(self, source: ImageSource, reads: Reads) -> SourceRead:
        return await reads.read_source(source.url)

    async def units(self, source: ImageSource, metadata: SourceRead, reads: Reads) -> OpenedImage:
        encoded, probe, salt = metadata.encoded, metadata.probe, reads.salt
        found = await identify_soon(encoded.digest, probe, source.budget, salt, self._spec)
        self._limits.check(found.recipe.canvas, probe, len(encoded.data), found.recipe)
        if source.uuid:
            reads.reader.remember(salt, source.uuid, metadata)
        frame = CachedFrame(encoded.digest, encoded, probe, found.recipe)
        kind: Kind = "document" if isinstance(source.url, RenderedPage) else "still"
        return OpenedImage(
            kind, found.image, (frame,), reads.requester, metadata.times, source.budget
        )

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        return jobs_of(image) if image.there else None

    def forget(self) -> None:
        """Do nothing: no pixels are cached."""

    async def close(self) -> None:
        """Do nothing: stills have no open files."""
