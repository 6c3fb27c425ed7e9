"""The trace of a request's images and prompt. It is the `saccade` field in responses, and is in the
log of slow requests.

`tracer.py` builds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType, structs

from saccade.core.family import Part
from saccade.core.types import CacheMiss, DraftCounts, Missed, Tier
from saccade.front.answer_update import AheadReport, FoundImage, Level
from saccade.media.opened import OpenedImage

if TYPE_CHECKING:
    from saccade.api.trace.changes import ImageChange

EVERYTHING: Part = (0.0, 0.0, 1.0, 1.0)
"""The region of a tile that shows the whole image."""
SILENT = "the audio is ignored"


class Size(Struct):
    """Width and height in pixels."""

    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""


class ImageCost(Struct):
    """The properties of an image, and its size for the model."""

    place: str
    """The part of the request, such as messages[0].content[1]."""
    digest: str
    """blake3 of the image's bytes, in hexadecimal. For a region, the digest of the whole image."""
    format: str
    """The image's type, according to its bytes."""
    bytes: int
    """The encoded image's size in bytes."""
    size: Size
    """The image's own size, upright."""
    resized: Size
    """The size that the model sees."""
    tokens: int
    """Tokens that represent the image."""
    region: tuple[int, int, int, int] | UnsetType = UNSET
    """The shown part, as [x0, y0, x1, y1]. Absent for the whole image."""

    @classmethod
    def of(cls, opened: OpenedImage, place: str) -> ImageCost:
        height, width = opened.probe.upright
        rows, columns = opened.image.canvas
        image, part = opened.image, opened.frames[0].part
        digest = image.key.digest if part is None else opened.encoded.digest
        return cls(
            place,
            digest.hex(),
            opened.probe.format,
            opened.nbytes,
            Size(width, height),
            Size(columns, rows),
            image.num_tokens,
            UNSET if part is None else part.corners,
        )


class ImageTimes(Struct):
    """How long each stage of one image took, in milliseconds."""

    fetch: float
    digest: float
    decode: float = 0.0
    # copying and hashing the pixels, from the end of decoding, or from when the engine requested
    # them if that was later
    ship: float = 0.0
    wait: float = 0.0  # from submission to the embedding, without the other times
    encode: float = 0.0
    encoder: float = 0.0  # requesting the embedding from an encoder server


class ImageStarts(Struct, omit_defaults=True):
    """When each stage of an image started, in milliseconds after the request's arrival.

    A time is negative if an earlier request started the stage, or if it started while the request's
    body arrived. It is absent if the stage was skipped.
    """

    fetch: float
    decode: float | UnsetType = UNSET
    ship: float | UnsetType = UNSET
    encode: float | UnsetType = UNSET


class ImageMissed(Struct, omit_defaults=True):
    """Why faster caches than the one with the image did not contain it."""

    kv: Missed | None = None
    embedding: Missed | None = None


class TilesTrace(Struct):
    """Which tiles of an image were encoded, if the vision encoder encodes tiles independently."""

    seen: int
    """Tiles that an earlier image also contained."""
    new: int
    """Tiles that were encoded."""
    places: Sequence[Part]
    """What each new tile shows: top, left, bottom, right, in fractions of the image's edges. Tiles
    that show the whole image are left out."""

    @classmethod
    def of(cls, found: FoundImage) -> TilesTrace:
        new = sum(found.tiles)
        shown = [part for fresh, part in zip(found.tiles, found.parts) if fresh]
        places = [each for each in shown if each != EVERYTHING]
        return cls(len(found.tiles) - new, new, places)


class ImageTrace(ImageCost, kw_only=True):
    """In which cache one image was found, and what it cost."""

    found: Level
    tier: Tier | UnsetType = UNSET  # tier of the embedding, if that was found
    # "embedding" if an encoder server sent it, or else why this server encoded the image; absent
    # without encoder servers
    encoder: str | UnsetType = UNSET
    tiles: TilesTrace | UnsetType = UNSET
    missed: ImageMissed
    ms: ImageTimes
    starts: ImageStarts
    same_as: str | UnsetType = UNSET  # path of the latest earlier image with identical pixels
    # fraction of 16-pixel squares that differ from the image before, if known
    changed: float | UnsetType = UNSET

    @classmethod
    def found_at(
        cls,
        found: FoundImage,
        opened: OpenedImage,
        place: str,
        arrival: float,
        change: ImageChange,
    ) -> ImageTrace:
        def start(ended: float, ms: float) -> float | UnsetType:
            return round((ended - arrival) * 1e3 - ms, 3) if ms else UNSET

        return cls(
            **structs.asdict(ImageCost.of(opened, place)),
            found=found.level,
            tier=found.tier or UNSET,
            encoder=found.encoder or UNSET,
            tiles=TilesTrace.of(found) if found.tiles else UNSET,
            missed=ImageMissed(found.missed_kv, found.missed_embedding),
            ms=ImageTimes(
                *(
                    round(ms, 3)
                    for ms in (
                        opened.times.fetch_ms,
                        opened.times.digest_ms,
                        found.decode_ms,
                        found.ship_ms,
                        found.wait_ms,
                        found.encode_ms,
                        found.encoder_ms,
                    )
                )
            ),
            starts=ImageStarts(
                round((opened.times.begun - arrival) * 1e3, 3),
                start(found.decoded, found.decode_ms),
                start(found.shipped, found.ship_ms),
                start(found.encoded, found.encode_ms),
            ),
            same_as=change.same_as or UNSET,
            changed=UNSET if change.share is None else change.share,
        )


class VideoTrace(Struct):
    """A summary of how the images of one video were found."""

    place: str
    summary: str
    found: Mapping[str, int]  # number of images by level; encoded: missed in all caches
    note: str | UnsetType = UNSET  # a part of the video that the model does not get

    @classmethod
    def of(cls, place: str, shown: Sequence[tuple[FoundImage, OpenedImage]]) -> VideoTrace:
        levels = Counter(
            "encoded" if each.level in ("none", "pixels") else each.level for each, _ in shown
        )
        noun = "pairs" if any(len(opened.frames) > 1 for _, opened in shown) else "frames"
        summary = ", ".join(f"{count} {level}" for level, count in levels.most_common())
        note = SILENT if shown[0][1].probe.sound else UNSET
        return cls(place, f"{noun} {len(shown)}: {summary}", dict(levels), note)


def video_traces(
    found: Sequence[FoundImage], opened: Sequence[OpenedImage], places: Sequence[str]
) -> list[VideoTrace]:
    """Return a summary of each video in a request, in order.

    found: the images, including the videos' frames.
    places: the path of each image in the client's request.
    """
    videos: dict[str, list[tuple[FoundImage, OpenedImage]]] = {}
    for each in found:
        if opened[each.image].of_video:
            videos.setdefault(places[each.image], []).append((each, opened[each.image]))
    return [VideoTrace.of(place, shown) for place, shown in videos.items()]


class RequestTimes(Struct):
    """When each stage of a request ended, in milliseconds after the request's arrival."""

    prepared: float  # submitted to the engine
    admitted: float  # started by the engine
    first_token: float
    total: float  # end of the answer
    body: float  # how long the body took to arrive, before that


class CacheTrace(Struct, omit_defaults=True):
    """How many tokens of the prompt were cached, and how many are pinned now."""

    cached_tokens: int
    tiers: dict[Tier, int] = {}  # cached tokens by tier
    kept: dict[str, int] = {}  # tokens now pinned, by duration ("300s")
    missed: CacheMiss | None = None  # why more was not found, if requested


def tiers_of(cached: int, restored: Iterable[tuple[Tier, int]]) -> dict[Tier, int]:
    """Return the number of cached tokens by tier.

    restored: the number of tokens loaded from each tier other than the device.
    """
    beside = dict(restored)
    here = cached - sum(beside.values())
    return {"device": here, **beside} if here else beside


class Trace(Struct):
    """How a request was processed: its images, times and cache hits."""

    images: Sequence[ImageTrace]  # in the order of the messages
    ms: RequestTimes
    prompt: CacheTrace
    ignored: Sequence[str] | UnsetType = UNSET  # fields that this model does not support
    videos: Sequence[VideoTrace] | UnsetType = UNSET  # one entry per video
    # draft tokens of the answers, one entry per source
    guesses: Sequence[DraftCounts] | UnsetType = UNSET
    ahead: AheadReport | UnsetType = UNSET  # the precomputed tokens for a request of a session
