"""Actions on a computer or a browser, in no particular API's or model's format, and their limits.

Coordinates are pixels of the client's screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Point = tuple[int, int]
"""(x, y), from the left edge and from the top."""
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
"""The types of actions.

press, release: press or release the mouse button.
hold: hold keys down for some time.
cursor: report the cursor's position.
call: call a function of the client's toolset.
answer: write a text for the user, which ends the task.
"""

NOTCH = 100
"""Pixels that one notch of a scroll wheel scrolls."""
MAX_PIXELS = 65_535
"""Maximum edge of a screen in pixels, which is also the maximum coordinate."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a screen, in no particular API's or model's format."""

    kind: Kind
    # where it happens: one point, the points of a drag in order, or two corners of the region to
    # zoom into. If empty, it happens at the cursor.
    path: tuple[Point, ...] = ()
    button: str = "left"
    count: int = 1
    keys: tuple[str, ...] = ()  # the chord to press, or to hold during the action
    text: str = ""
    scroll: tuple[int, int] = (0, 0)  # pixels to the right, and down
    seconds: float = 1
    repeat: int = 1
    target: str = ""  # the reference of a page element
    tab: str = ""  # the ID of a browser tab
    name: str = ""  # the name of a called function
    arguments: Mapping[str, Any] = field(default_factory=dict)
