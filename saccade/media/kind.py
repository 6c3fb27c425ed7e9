"""The kinds of media that a request may hold, as `Media` sees them: one protocol that each answers.

    check    what the fields and the model refuse, before anything is fetched
    begin    the reads that a source needs, which take a while
    metadata the facts of its bytes: names and sizes; no pixel is made
    units    what the model is shown of it, each with its name and its cost
    pixels   how one of these images is made

Knows no kind.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from saccade.media.opened import OpenedImage
from saccade.media.sources.source_reader import Reads
from saccade.media.workers.decode_queue import Job

S_contra = TypeVar("S_contra", contravariant=True)
C = TypeVar("C")
U_co = TypeVar("U_co", covariant=True)


class MediaKind(Protocol[S_contra, C, U_co]):
    """What one kind answers about its sources. Errors name the fault. `Media` adds the place."""

    def check(self, source: S_contra) -> None:
        """Raise InvalidRequest for what this model or this installation cannot see."""
        ...

    def begin_reads(self, source: S_contra, reads: Reads) -> None:
        """Begin the reads that others may share."""
        ...

    async def metadata(self, source: S_contra, reads: Reads) -> C:
        """Return the facts of a source's bytes. Raises ImageError, TooLarge, NotFound."""
        ...

    async def units(self, source: S_contra, metadata: C, reads: Reads) -> U_co:
        """Name what is shown. Raises ImageError, InvalidRequest."""
        ...

    async def pixels(self, image: OpenedImage) -> list[Job] | None:
        """Return the decodes for one image, in canvas order, or `None` if its bytes are gone."""
        ...
