"""What became of each picture of a request: the `saccade` field of answers, and the log of slow
requests.

Owns the shapes, and how a request's pictures and what the front found of them are put together.
Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType, structs

from saccade.core.types import CacheMiss, CacheReport, Missed, Tier
from saccade.front.front import Event, FoundImage, Level
from saccade.front.intake import Prepared
from saccade.media.media import OpenedImage


class Size(Struct):
    """In pixels."""

    width: int
    height: int


class ImageCost(Struct):
    """A picture as its header describes it (upright), and what it comes to.

    `place` is what the request calls it.
    """

    place: str
    digest: str
    format: str
    bytes: int
    size: Size
    resized: Size
    tokens: int

    @classmethod
    def of(cls, opened: OpenedImage, place: str) -> ImageCost:
        height, width = opened.probe.upright
        rows, columns = opened.size
        image = opened.image
        digest = image.key.digest.hex()
        return cls(
            place,
            digest,
            opened.probe.format,
            len(opened.data),
            Size(width, height),
            Size(columns, rows),
            image.num_tokens,
        )


class ImageTimes(Struct):
    """Milliseconds for one picture.

    `wait` is what passed from submission to the embedding beside the others. `encoder`: what asking
    another server for the embedding took.
    """

    fetch: float
    digest: float
    decode: float = 0.0
    wait: float = 0.0
    encode: float = 0.0
    encoder: float = 0.0


class ImageStarts(Struct, omit_defaults=True):
    """When a picture's stages began, in milliseconds from the arrival of the request; negative for
    what another request had begun. UNSET: this request had no such stage.
    """

    fetch: float
    decode: float | UnsetType = UNSET
    encode: float | UnsetType = UNSET


class ImageMissed(Struct, omit_defaults=True):
    """Why a picture was not found at a level above the one where it was found."""

    kv: Missed | None = None
    embedding: Missed | None = None


class ImageTrace(ImageCost, kw_only=True):
    """What became of one picture. `tier`: where its embedding was, if it was found there.
    `encoder`: what came of asking an encoder for it, if one was asked: "embedding", or why it was
    encoded here.
    """

    found: Level
    tier: Tier | UnsetType = UNSET
    encoder: str | UnsetType = UNSET
    missed: ImageMissed
    ms: ImageTimes
    starts: ImageStarts

    @classmethod
    def found_at(
        cls, found: FoundImage, opened: OpenedImage, place: str, arrival: float
    ) -> ImageTrace:
        def start(ended: float, ms: float) -> float | UnsetType:
            return round((ended - arrival) * 1e3 - ms, 3) if ms else UNSET

        return cls(
            **structs.asdict(ImageCost.of(opened, place)),
            found=found.level,
            tier=found.tier or UNSET,
            encoder=found.encoder or UNSET,
            missed=ImageMissed(found.missed_kv, found.missed_embedding),
            ms=ImageTimes(
                *(
                    round(ms, 3)
                    for ms in (
                        opened.fetch_ms,
                        opened.digest_ms,
                        found.decode_ms,
                        found.wait_ms,
                        found.encode_ms,
                        found.encoder_ms,
                    )
                )
            ),
            starts=ImageStarts(
                round((opened.read - arrival) * 1e3, 3),
                start(found.decoded, found.decode_ms),
                start(found.encoded, found.encode_ms),
            ),
        )


class RequestTimes(Struct):
    """Milliseconds from the arrival of a request: to its submission to the engine, to when the
    engine began with it, to the first token, to the end.
    """

    prepared: float
    admitted: float
    first_token: float
    total: float


class CacheTrace(Struct, omit_defaults=True):
    """What became of a request's prompt: tokens that were found, those that were computed and are
    now kept, by the time they are ("300s"), and why more were not found, where that was asked.
    """

    cached_tokens: int
    kept: dict[str, int] = {}
    missed: CacheMiss | None = None


class Trace(Struct):
    """What became of a request's pictures. `images` are in the order of the messages."""

    images: Sequence[ImageTrace]
    ms: RequestTimes
    prompt: CacheTrace


class Tracer:
    """Listens to a request's events. `wanted`: the client asked for the trace."""

    def __init__(self, prepared: Sequence[Prepared], wanted: bool) -> None:
        self.wanted = wanted
        self._prepared = prepared[0]
        self._arrival = self._prepared.request.arrival
        self._ready = time.monotonic()
        self._first: float | None = None
        self._admitted = 0.0
        self._found: tuple[FoundImage, ...] = ()
        self._prompt = CacheTrace(0)

    def add(self, event: Event) -> None:
        if self._first is None and event.scores is None:
            self._first = time.monotonic()
            self._admitted = event.admitted
            report = event.caching or CacheReport()
            kept = {f"{seconds}s": tokens for seconds, tokens in report.written}
            self._prompt = CacheTrace(event.cached_tokens, kept, report.missed)
        # Only chats have pictures, and a chat has one prompt: its first answer tells of them.
        if event.found and event.choice == 0:
            self._found = event.found

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return time.monotonic() - self._arrival

    @property
    def trace(self) -> Trace:
        """At the end of the answer."""
        opened, places = self._prepared.opened, self._prepared.places
        images = [
            ImageTrace.found_at(found, opened[found.image], places[found.image], self._arrival)
            for found in self._found
        ]
        now = time.monotonic()
        first = now if self._first is None else self._first
        # What never got a slot waited to the end.
        moments = (self._ready, self._admitted or first, first, now)
        return Trace(
            images,
            RequestTimes(*(round((moment - self._arrival) * 1e3, 3) for moment in moments)),
            self._prompt,
        )
