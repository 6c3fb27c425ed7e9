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
    """The picture's pixels lie in the arena.

    The engine owns the slot until it names it in `PixelsDone`.
    """

    key: ImageKey
    slot: PixelSlot


@dataclass(frozen=True, slots=True)
class PixelsFailed:
    """The picture cannot be decoded: every request that waits for it ends with this error."""

    key: ImageKey
    error: str


@dataclass(frozen=True, slots=True)
class ArenaFull:
    """A picture that the engine wants finds no room, and all room is the engine's: only what it
    names in `News.done` can help.
    """


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

    want: pictures to be encoded soon whose pixels the engine has not seen: decode them first.
    done: arena slots the engine has finished with, to be freed.
    confirmed: pictures whose embedding is now resident: no need to decode them ahead again.
    encoded: pictures that were run through the vision tower, the ms that took, and when it was
    done, as in `plan.StepResult`.
    metrics: absolute values of the engine's metrics that changed: (name, label values, value).
    """

    deltas: tuple[Delta, ...] = ()
    want: tuple[ImageKey, ...] = ()
    done: tuple[PixelSlot, ...] = ()
    confirmed: tuple[ImageKey, ...] = ()
    encoded: tuple[tuple[ImageKey, float, float], ...] = ()
    metrics: tuple[tuple[str, tuple[str, ...], float], ...] = ()


ToEngine = Submit | Abort | PixelsReady | PixelsFailed | ArenaFull | Stop
ToFront = Ready | Failed | News
