"""The states in which the image scheduler keeps images. Owns no decision."""

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
    """An image on its way to the device.

    asked: the front writes to the slot. arrived: pixels are in the slot. encoding: the tower reads
    the slot.
    """

    image: Image
    slot: PixelSlot
    stage: Literal["asked", "arrived", "encoding"]
    patches: int  # for the tower
    reused: bool = False  # the pixels were still in the slot from an earlier use
    unwanted: bool = False  # the front was notified to stop
    given: bool = False  # the slot holds an embedding made by another server
    adapter: int = 0  # its number, while the image is encoded with one
    idle: bool = False  # the encoding began before anyone waited for it
    copies: tuple[TileCopy, ...] = ()  # tiles that need no tower
    # the image that is being encoded with tiles of this one, which then begins later
    awaits: ImageKey | None = None


@dataclass(slots=True)
class Fresh:
    """A newly encoded embedding. Each of its two states holds the embedding on the device once."""

    ahead: bool = True
    unsaved: bool = False


@dataclass(slots=True)
class ImageScan:
    """One walk over the needed images, in order of need."""

    builder: PlanBuilder
    match: Callable[[Sequence], int]  # looks up a waiting sequence in the prefix cache
    asking: bool = True  # asking, encoding: more images may be asked for, or begin to be encoded
    encoding: bool = True
    first: bool = True  # every image so far was there
    starved: Image | None = None  # the first missing image, if the arena was too full for it
    # images passed by the walk, all needed sooner than the present image
    seen: set[ImageKey] = field(default_factory=set)
