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
class UnderWay:
    """An image on its way to the device.

    asked: the front writes to the slot. arrived: pixels are in the slot. encoding: the tower reads
    the slot.

    reused: the pixels were still in the slot from an earlier use. unwanted: the front was told to
    stop. given: the slot holds an embedding made by another server. adapter: its number, while the
    image is encoded with one. idle: the encoding began before anyone waited for it. patches: for
    the tower. copies: tiles that need no tower. awaits: the image that is being encoded with tiles
    of this one, which then begins later.
    """

    image: Image
    slot: PixelSlot
    stage: Literal["asked", "arrived", "encoding"]
    patches: int
    reused: bool = False
    unwanted: bool = False
    given: bool = False
    adapter: int = 0
    idle: bool = False
    copies: tuple[TileCopy, ...] = ()
    awaits: ImageKey | None = None


@dataclass(slots=True)
class Fresh:
    """A newly encoded embedding. Each of its two states holds the embedding on the device once."""

    ahead: bool = True
    unsaved: bool = False


@dataclass(slots=True)
class Walk:
    """One walk over the needed images, in order of need.

    match: looks up a waiting sequence in the prefix cache. asking, encoding: more images may be
    asked for, or begin to be encoded. first: every image so far was there. starved: the first
    missing image, if the arena was too full for it. seen: images passed by the walk, all needed
    sooner than the present image.
    """

    builder: PlanBuilder
    match: Callable[[Sequence], int]
    asking: bool = True
    encoding: bool = True
    first: bool = True
    starved: Image | None = None
    seen: set[ImageKey] = field(default_factory=set)
