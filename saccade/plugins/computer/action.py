"""What is done to a computer or a browser, in no API's and no model's words.

Owns `Action` and its bounds. Coordinates are pixels of the client's screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Point = tuple[int, int]
"""(x, y), from the left and from the top."""
Kind = Literal[
    "click",
    "move",
    "press",
    "release",
    "drag",
    "scroll",
    "key",
    "hold",
    "type",
    "wait",
    "screenshot",
    "zoom",
    "cursor",
    "call",
    "answer",
]
"""press, release: of the mouse button. hold: of keys, for a time. cursor: asks where it is. call: a
function of the client's toolset. answer: words to the user, which end the task.
"""

NOTCH = 100
"""Pixels that stand for one notch of a scroll wheel."""
MAX_PIXELS = 65_535
"""The longest side of a screen, and the farthest coordinate."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action."""

    kind: Kind
    # where it happens: one point, a drag's points in order, or two corners of the part to zoom
    # into. Without one, it happens where the cursor is.
    path: tuple[Point, ...] = ()
    button: str = "left"
    count: int = 1
    keys: tuple[str, ...] = ()  # the chord that is pressed, or held meanwhile
    text: str = ""
    scroll: tuple[int, int] = (0, 0)  # pixels to the right and down
    seconds: float = 1
    repeat: int = 1
    target: str = ""  # a page element's reference
    tab: str = ""  # a browser's
    name: str = ""  # name, arguments: of a call
    arguments: Mapping[str, Any] = field(default_factory=dict)
