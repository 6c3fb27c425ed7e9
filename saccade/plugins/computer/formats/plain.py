"""Saccade's own tool, for models without a published action format. Coordinates are thousandths."""

from __future__ import annotations

from typing import Any

from saccade.plugins.computer.action_format import ActionFormat, Words
from saccade.plugins.computer.one_tool import parameters
from saccade.plugins.computer.screen import THOUSANDTHS
from saccade.plugins.computer.vocabulary import ActionWords, Word
from saccade.plugins.computer.word_fields import (
    MAX_SECONDS,
    Amount,
    Chord,
    PointPair,
    Reference,
    Region,
    Texts,
    Wheel,
)

_AT = PointPair("coordinate")
_HELD = Chord("keys", "x11", "+", required=False)
_ELEMENT = Reference("ref")
_SECONDS = Amount("seconds", "seconds", MAX_SECONDS)
WORDS = {
    "left_click": Word("click", (_AT, _HELD), about="Click the left mouse button."),
    "double_click": Word("click", (_AT, _HELD), {"count": 2}, about="Click it twice."),
    "triple_click": Word("click", (_AT, _HELD), {"count": 3}, about="Click it three times."),
    "right_click": Word(
        "click", (_AT, _HELD), {"button": "right"}, about="Click the right button."
    ),
    "middle_click": Word(
        "click", (_AT, _HELD), {"button": "middle"}, about="Click the middle button."
    ),
    "click_element": Word(
        "click", (_ELEMENT, _HELD), about="Click an element of the page by its reference."
    ),
    "hover_element": Word("move", (_ELEMENT,), about="Move the cursor to an element."),
    "move": Word("move", (_AT,), about="Move the cursor."),
    "drag": Word(
        "drag",
        (PointPair("start"), _AT, _HELD),
        about="Press the left button at `start`, move to `coordinate`, and release it.",
    ),
    "mouse_down": Word("press", about="Press the left button and hold it."),
    "mouse_up": Word("release", about="Release the left button."),
    "scroll": Word(
        "scroll", (_AT, Wheel("direction", "notches"), _HELD), about="Turn the scroll wheel."
    ),
    "type": Word("type", (Texts("text", "text"),), about="Type a text."),
    "key": Word(
        "key",
        (Chord("keys", "x11", "+"),),
        about='Press keys together, as in "ctrl+s" or "Return".',
    ),
    "hold_key": Word(
        "hold", (Chord("keys", "x11", "+"), _SECONDS), about="Hold keys for some seconds."
    ),
    "wait": Word("wait", (_SECONDS,), about="Wait for some seconds."),
    "screenshot": Word("screenshot", about="See the screen."),
    "zoom": Word("zoom", (Region("region"),), about="See a part of the screen in full detail."),
    "cursor_position": Word("cursor", about="Ask where the cursor is."),
}
_FIELDS = {
    "coordinate": ("array", "[x, y], each from 0 to 1000. Needed by {}."),
    "start": ("array", "[x, y]. Needed by {}."),
    "region": ("array", "[x0, y0, x1, y1], opposite corners. Needed by {}."),
    "text": ("string", "Needed by {}."),
    "keys": ("string", "Needed by {}. Clicks, drags and scrolls hold them meanwhile."),
    "ref": ("string", "An element's reference, such as ref_7. Needed by {}."),
    "direction": ("string", "up, down, left or right. Needed by {}."),
    "notches": ("integer", "Needed by {}."),
    "seconds": ("integer", "Needed by {}."),
}
_ABOUT = (
    "Use the mouse and the keyboard of a computer whose screen you see in screenshots. x counts "
    f"from the left edge (0) to the right ({THOUSANDTHS}), y from the top (0) to the bottom "
    f"({THOUSANDTHS})."
)


def _describe(words: Words, resolution: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG001
    return _ABOUT, parameters(words, "What to do:", "action", _FIELDS)


FORMAT = ActionFormat(
    "plain",
    serves=lambda *_: True,
    order=100,
    vocabulary=ActionWords(WORDS, "computer"),
    in_pixels=lambda _: False,
    describe=_describe,
    note="a tool of ours: this model publishes no way to act",
)
