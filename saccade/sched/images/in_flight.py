"""Records of the image scheduler: images that are being loaded or encoded, embeddings that were
just encoded, and a pass over the needed images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from saccade.core.plan import PixelSlot, TileCopy
from saccade.core.types import Image, ImageKey
from saccade.sched.builder import PlanBuilder
from saccade.sched.sequence import Sequence


@dataclass(slots=True)
class InFlightImage:
    """An image that has a slot in the pixel arena but no embedding on the device yet."""

    image: Image
    slot: PixelSlot
    # asked: the front end writes to the slot. arrived: the pixels are in the slot. encoding: the
    # vision encoder reads the slot.
    stage: Literal["asked", "arrived", "encoding"]
    patches: int  # how many patches the vision encoder must compute
    reused: bool = False  # the pixels were still in the slot from an earlier use
    unwanted: bool = False  # the front end was notified to stop decoding
    given: bool = False  # the slot has an embedding computed by another server
    adapter: int = 0  # index of the adapter that the image is encoded with, 0 for none
    idle: bool = False  # when the encoding started, only background requests needed the image
    copies: tuple[TileCopy, ...] = ()  # tiles that are copied instead of encoded
    # An image that is being encoded and has tiles in common with this one, whose encoding starts
    # later so that it can copy them.
    awaits: ImageKey | None = None


@dataclass(slots=True)
class Fresh:
    """An embedding that was just encoded.

    It is held on the device once while it is `ahead`, and once while it is `unsaved`.
    """

    ahead: bool = True  # no plan has used it yet
    unsaved: bool = False  # no plan has written it to disk yet


@dataclass(slots=True)
class ImageScan:
    """State of one pass over the images that sequences need, the most urgent first."""

    builder: PlanBuilder
    match: Callable[[Sequence], int]  # looks up a waiting sequence in the prefix cache
    asking: bool = True  # more images may be requested
    encoding: bool = True  # the encoding of more images may start
    first: bool = True  # every image before the current one was available
    starved: Image | None = None  # the first missing image, if the arena was too full for it
    # the images visited so far, all of which are needed before the current one
    seen: set[ImageKey] = field(default_factory=set)
