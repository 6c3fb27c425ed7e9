"""Lookups of embeddings in the folder shared with other servers: beside the loop, when a request
comes, so that images encoded elsewhere are read instead of encoded.

Owns the requests that wait for a lookup, for a moment at most. An unresponsive folder is left alone
for a while, and its embeddings count as missing. Reads no file: the worker does, and encodes the
image if the file has gone.
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
"""Seconds that a request waits for a look."""
AWAY_SECONDS = 10.0
"""After a look that took longer, requests do not wait at all for so long."""

Sight = tuple[tuple[Image, bool], ...]
"""Images, and whether the embedding of each is there."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request, and the time at which it continues without an answer."""

    request: Request
    look: Future[Sight]
    until: float


class StoreProbe:
    """Looks into `folder`. `begin_probe` begins a lookup for a request; `take_ready` returns the
    request after a call of `wake`.
    """

    def __init__(self, folder: str, wake: Callable[[], object]) -> None:
        """Prepare lookups in `folder`. `wake` is called by the loop."""
        self._folder = Path(folder)
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "saccade-store")
        self._waiting: dict[str, _Waiting] = {}
        self._away_until = 0.0

    @property
    def waiting(self) -> bool:
        """Return True if a request has yet to be taken."""
        return bool(self._waiting)

    def begin_probe(self, request: Request, images: Sequence[Image]) -> bool:
        """Look for the embeddings of `images`. Returns False while the folder is unresponsive."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            return False
        look = self._thread.submit(self._look, tuple(images))
        self._waiting[request.id] = _Waiting(request, look, loop.time() + PATIENCE)
        look.add_done_callback(lambda _: loop.call_soon_threadsafe(self._wake))
        loop.call_later(PATIENCE, self._wake)
        return True

    def drop(self, id: str) -> bool:
        """Forget a request. Returns True if it was waiting."""
        waited = self._waiting.pop(id, None)
        if waited is not None:
            waited.look.cancel()
        return waited is not None

    def take_ready(self) -> list[tuple[Request, Sight]]:
        """Take the requests that continue, in order of arrival, each once."""
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
        """End every waiting request with an error."""
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
