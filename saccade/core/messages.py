"""What the front process and the engine process say to each other (msgpack over a local socket,
encoded by `engine/link.py`).

Pixels never travel here: they lie in the shared arena and a `PixelSlot` says where.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.plan import PixelSlot
from saccade.core.types import Delta, ImageKey, Request

# ---- front -> engine


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. Its pictures' pixels come separately, or never if they are not needed."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has left, or a stop string was seen.

    Answered by a final delta (`abort`) unless the request has already ended.
    """

    id: str


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The image's pixels lie in the slot that `News.want` named, and nothing writes there any
    more.
    """

    key: ImageKey


@dataclass(frozen=True, slots=True)
class PixelsFailed:
    """The image cannot be decoded, or its decode was called off; nothing writes to its slot any
    more. Every request that waits for an image that was wanted ends with this error.
    """

    key: ImageKey
    error: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs, then exit.

    Requests still unfinished after `grace` seconds end with an error.
    """

    grace: float


# ---- engine -> front


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has loaded the model.

    `decided` lists what start-up decided, for people: (name, value).
    """

    kv_tokens: int
    context_length: int
    decided: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on (at start-up or later). It exits after this."""

    error: str


@dataclass(frozen=True, slots=True)
class News:
    """What one turn of the engine loop has for the front; empty parts are usual.

    want: images to decode, each into its slot of the arena; answered by `PixelsReady` or
    `PixelsFailed`. unwanted: images, wanted before, that nobody needs any more: stop decoding them.
    encoded: images that were run through the vision tower, the ms that took, and when it was
    done, as in `plan.StepResult`.
    metrics: absolute values of the engine's metrics that changed: (name, label values, value).
    """

    deltas: tuple[Delta, ...] = ()
    want: tuple[tuple[ImageKey, PixelSlot], ...] = ()
    unwanted: tuple[ImageKey, ...] = ()
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    metrics: tuple[tuple[str, tuple[str, ...], float], ...] = ()


ToEngine = Submit | Abort | PixelsReady | PixelsFailed | Stop
ToFront = Ready | Failed | News
