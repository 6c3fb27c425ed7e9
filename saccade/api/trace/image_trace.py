"""Each image's way through a request: the `saccade` field in answers, and the log of slow requests.

Owns the shapes. `tracer.py` fills them.
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
"""What a tile shows that is the whole image."""
SILENT = "the audio is ignored"


class Size(Struct):
    """In pixels."""

    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""


class ImageCost(Struct):
    """An image by its header (upright), and its size after processing."""

    place: str
    """The part of the request, such as messages[0].content[1]."""
    digest: str
    """blake3 of the image's bytes, in hexadecimal. A region has the whole image's."""
    format: str
    """The image's type, according to its bytes."""
    bytes: int
    """The encoded image's size in bytes."""
    size: Size
    """The image's own size, upright."""
    resized: Size
    """The size that the model sees."""
    tokens: int
    """Tokens that stand for the image."""
    region: tuple[int, int, int, int] | UnsetType = UNSET
    """The shown part, as [x0, y0, x1, y1]. UNSET for all of the image."""

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
    """Milliseconds for one image.

    `ship`: copying and hashing the pixels, from the decode's end, or from the engine's request for
    them if that was later. `wait`: from submission to the embedding, outside the other times.
    `encoder`: the time spent
    asking another server for the embedding.
    """

    fetch: float
    digest: float
    decode: float = 0.0
    ship: float = 0.0
    wait: float = 0.0
    encode: float = 0.0
    encoder: float = 0.0


class ImageStarts(Struct, omit_defaults=True):
    """When each stage of an image began, in milliseconds from the request's arrival. Negative for a
    stage begun by another request, or while the request arrived. UNSET: the image skipped this
    stage.
    """

    fetch: float
    decode: float | UnsetType = UNSET
    ship: float | UnsetType = UNSET
    encode: float | UnsetType = UNSET


class ImageMissed(Struct, omit_defaults=True):
    """The reason why an image was missed at a level above the hit."""

    kv: Missed | None = None
    embedding: Missed | None = None


class TilesTrace(Struct):
    """An encoded image's tiles, where the vision encoder sees them apart."""

    seen: int
    """Tiles that an earlier image had."""
    new: int
    """Tiles run through the vision tower."""
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
    """One image's way. `tier`: the embedding's tier, if found. `encoder`: the outcome of asking an
    encoder, if any: "embedding", or the reason for encoding on this server. `same_as`: the place of
    the latest earlier image with the same pixels. `changed`: the share of squares of 16 pixels
    that differ from the image before, if both were looked at.
    """

    found: Level
    tier: Tier | UnsetType = UNSET
    encoder: str | UnsetType = UNSET
    tiles: TilesTrace | UnsetType = UNSET
    missed: ImageMissed
    ms: ImageTimes
    starts: ImageStarts
    same_as: str | UnsetType = UNSET
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
    """The way of one video's images in one line. `found`: the number at each level; "encoded":
    missed at every level. `note`: a part of the video that stays hidden from every model.
    """

    place: str
    summary: str
    found: Mapping[str, int]
    note: str | UnsetType = UNSET

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
    """Return a line for each video in a request, in order."""
    videos: dict[str, list[tuple[FoundImage, OpenedImage]]] = {}
    for each in found:
        if opened[each.image].of_video:
            videos.setdefault(places[each.image], []).append((each, opened[each.image]))
    return [VideoTrace.of(place, shown) for place, shown in videos.items()]


class RequestTimes(Struct):
    """Milliseconds from a request's arrival to its submission to the engine, to the engine's begin,
    to the first token, to the end. `body`: what its body took to arrive, before that.
    """

    prepared: float
    admitted: float
    first_token: float
    total: float
    body: float


class CacheTrace(Struct, omit_defaults=True):
    """The way of a request's prompt: tokens found, by tier, too; tokens computed and now kept, by
    keeping time ("300s"). Also the reason for further misses, if requested.
    """

    cached_tokens: int
    tiers: dict[Tier, int] = {}
    kept: dict[str, int] = {}
    missed: CacheMiss | None = None


def tiers_of(cached: int, restored: Iterable[tuple[Tier, int]]) -> dict[Tier, int]:
    """Count cached tokens by tier. `restored`: tokens off the device."""
    beside = dict(restored)
    here = cached - sum(beside.values())
    return {"device": here, **beside} if here else beside


class Trace(Struct):
    """The way of a request's images. `images`: in the messages' order. `ignored`: fields without a
    switch in this model. `videos`: a line for each. `guesses`: among the answers' tokens, a line
    for each source. `ahead`: what was computed before the request came, if its session is followed.
    """

    images: Sequence[ImageTrace]
    ms: RequestTimes
    prompt: CacheTrace
    ignored: Sequence[str] | UnsetType = UNSET
    videos: Sequence[VideoTrace] | UnsetType = UNSET
    guesses: Sequence[DraftCounts] | UnsetType = UNSET
    ahead: AheadReport | UnsetType = UNSET
