"""Looks up embeddings in a directory shared with other servers when a request arrives, so that
images encoded elsewhere are read instead of encoded.

Lookups run in a thread, and a request waits for its result for a fraction of a second at most. If
the directory does not respond, it is not used for a while, and its embeddings count as missing. The
worker reads the files, and encodes an image if its file has been deleted by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from saccade.core.store import file_name
from saccade.core.types import Delta, Image, Request

log = logging.getLogger("saccade")

PATIENCE = 0.25
"""Maximum seconds that a request waits for its lookup."""
AWAY_SECONDS = 10.0
"""After a lookup has timed out, requests do not use the directory for this long."""

Sight = tuple[tuple[Image, bool], ...]
"""The result of a lookup: images, each with True if its embedding was found."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose lookup is in progress, and the time at which it stops waiting."""

    request: Request
    look: Future[Sight]
    until: float


class StoreProbe:
    """Looks up embeddings in one directory.

    `begin_probe` starts a lookup for a request. It calls `wake` when `take_ready` may return the
    request.
    """

    def __init__(self, folder: str, wake: Callable[[], object]) -> None:
        """Prepare lookups in `folder`.

        wake: called on the event loop when a lookup has ended or timed out.
        """
        self._folder = Path(folder)
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "saccade-store")
        self._waiting: dict[str, _Waiting] = {}
        self._away_until = 0.0

    @property
    def waiting(self) -> bool:
        """Return True if there are requests that `take_ready` has not returned yet."""
        return bool(self._waiting)

    def begin_probe(self, request: Request, images: Sequence[Image]) -> bool:
        """Start to look for the embeddings of `images`.

        Returns False, without a lookup, if the directory did not respond recently.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            return False
        look = self._thread.submit(self._look, tuple(images))
        self._waiting[request.id] = _Waiting(request, look, loop.time() + PATIENCE)
        look.add_done_callback(lambda _: loop.call_soon_threadsafe(self._wake))
        loop.call_later(PATIENCE, self._wake)
        return True

    def drop(self, id: str) -> bool:
        """Remove a request. Return True if it was waiting."""
        waited = self._waiting.pop(id, None)
        if waited is not None:
            waited.look.cancel()
        return waited is not None

    def take_ready(self) -> list[tuple[Request, Sight]]:
        """Remove and return the requests whose lookups have ended or timed out, in the order they
        arrived.
        """
        found: list[tuple[Request, Sight]] = []
        now = asyncio.get_running_loop().time()
        for id, waited in list(self._waiting.items()):
            if waited.look.done():
                found.append((waited.request, waited.look.result()))
            elif now >= waited.until:
                if now >= self._away_until:
                    log.warning("%s does not respond; images may be encoded again", self._folder)
                self._away_until = now + AWAY_SECONDS
                waited.look.cancel()
                found.append((waited.request, ()))
            else:
                continue
            del self._waiting[id]
        return found

    def fail_all(self, error: str) -> list[Delta]:
        """Remove every waiting request, and return a delta with the error for each."""
        ended = [Delta(id, finish="error", error=error) for id in self._waiting]
        self._waiting.clear()
        return ended

    def _look(self, images: Sequence[Image]) -> Sight:
        return tuple((image, _is_file(self._folder / file_name(image.key))) for image in images)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
