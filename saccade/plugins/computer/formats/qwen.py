"""The function `computer_use` of Qwen2.5-VL, Qwen3-VL and Qwen3.5, as in their cookbooks.

Coordinates are pixels of the resized image in Qwen2.5-VL, and thousandths of the screen in later
models. A drag starts at the cursor. Saccade adds `screenshot` and `zoom`, for clients that send a
screenshot only on request, `click_element` and `hover_element`, for browsers that report references
of elements, and keys to hold during an action.
"""

from __future__ import annotations

from typing import Any

from saccade.plugins.computer.action_format import ActionFormat, Words
from saccade.plugins.computer.one_tool import parameters
from saccade.plugins.computer.vocabulary import ActionWords, Word
from saccade.plugins.computer.word_fields import (
    MAX_SECONDS,
    Amount,
    Chord,
    OneOf,
    PointPair,
    Reference,
    Region,
    Scrolled,
    Texts,
)

_AT = PointPair("coordinate")
_HERE = PointPair("coordinate", required=False)
_HELD = Chord("keys", "pyautogui", required=False)
_SPOT = "at a specified (x, y) pixel coordinate on the screen."
WORDS = {
    "key": Word(
        "key",
        (Chord("keys", "pyautogui"),),
        about="Performs key down presses on the arguments passed in order, then performs key "
        "releases in reverse order.",
    ),
    "type": Word("type", (Texts("text", "text"),), about="Type a string of text on the keyboard."),
    "mouse_move": Word(
        "move",
        (_AT,),
        about="Move the cursor to a specified (x, y) pixel coordinate on the screen.",
    ),
    "left_click": Word("click", (_AT, _HELD), about=f"Click the left mouse button {_SPOT}"),
    "left_click_drag": Word(
        "drag",
        (_AT, _HELD),
        about="Click and drag the cursor to a specified (x, y) pixel coordinate on the screen.",
    ),
    "right_click": Word(
        "click", (_AT, _HELD), {"button": "right"}, about=f"Click the right mouse button {_SPOT}"
    ),
    "middle_click": Word(
        "click", (_AT, _HELD), {"button": "middle"}, about=f"Click the middle mouse button {_SPOT}"
    ),
    "double_click": Word(
        "click", (_AT, _HELD), {"count": 2}, about=f"Double-click the left mouse button {_SPOT}"
    ),
    "triple_click": Word(
        "click", (_AT, _HELD), {"count": 3}, about=f"Triple-click the left mouse button {_SPOT}"
    ),
    "scroll": Word(
        "scroll",
        (_HERE, Scrolled({"pixels": 1}, sign=-1), _HELD),
        about="Performs a scroll of the mouse scroll wheel.",
    ),
    "hscroll": Word(
        "scroll", (_HERE, Scrolled({"pixels": 0}), _HELD), about="Performs a horizontal scroll."
    ),
    "wait": Word(
        "wait",
        (Amount("time", "seconds", MAX_SECONDS, whole=False),),
        about="Wait specified seconds for the change to happen.",
    ),
    "screenshot": Word("screenshot", about="Take a screenshot of the screen."),
    "zoom": Word(
        "zoom", (Region("region"),), about="Take a screenshot of a region, at its full resolution."
    ),
    "click_element": Word(
        "click", (Reference("ref"), _HELD), about="Click an element of the page by its reference."
    ),
    "hover_element": Word(
        "move", (Reference("ref"),), about="Move the cursor to an element of the page."
    ),
    "terminate": Word(
        "answer",
        (OneOf("status", "text", {"success": "success", "failure": "failure"}),),
        about="Terminate the current task and report its completion status.",
    ),
    "answer": Word("answer", (Texts("text", "text"),), about="Answer a question."),
}
_FIELDS = {
    "keys": ("array", "Required only by {}."),
    "text": ("string", "Required only by {}."),
    "coordinate": (
        "array",
        "(x, y): The x (pixels from the left edge) and y (pixels from the top edge) coordinates to "
        "move the mouse to.",
    ),
    "pixels": (
        "number",
        "The amount of scrolling to perform. Positive values scroll up, negative values scroll "
        "down. Required only by {}.",
    ),
    "time": ("number", "The seconds to wait. Required only by {}."),
    "region": ("array", "(x0, y0, x1, y1): The corners of the region. Required only by {}."),
    "ref": ("string", "An element's reference, such as ref_7. Required only by {}."),
    "status": ("string", "The status of the task. Required only by {}."),
}
_ABOUT = """Use a mouse and keyboard to interact with a computer, and take screenshots.
* This is an interface to a desktop GUI. You do not have access to a terminal or applications \
menu. You must click on desktop icons to start applications.
* Some applications may take time to start or process actions, so you may need to wait and take \
successive screenshots to see the results of your actions. E.g. if you click on Firefox and a \
window doesn't open, try wait and taking another screenshot.{resolution}
* Whenever you intend to move the cursor to click on an element like an icon, you should consult \
a screenshot to determine the coordinates of the element before moving the cursor.
* If you tried clicking on a program or link but it failed to load, even after waiting, try \
adjusting your cursor position so that the tip of the cursor visually falls on the element that \
you want to click.
* Make sure to click any buttons, links, icons, etc with the cursor tip in the center of the \
element. Don't click boxes on their edges unless asked."""
_NEWER = ("qwen3_vl", "qwen3_5")


def _in_pixels(family: str) -> bool:
    return family.startswith("qwen2_5_vl")


def _describe(words: Words, resolution: str) -> tuple[str, dict[str, Any]]:
    told = f"\n* The screen's resolution is {resolution}." if resolution else ""
    shown = parameters(
        words, "The action to perform. The available actions are:", "action", _FIELDS
    )
    return _ABOUT.format(resolution=told), shown


FORMAT = ActionFormat(
    "computer_use",
    serves=lambda family, _: family.startswith((*_NEWER, "qwen2_5_vl")),
    order=20,
    vocabulary=ActionWords(WORDS, "computer_use"),
    in_pixels=_in_pixels,
    describe=_describe,
    note="as Qwen publishes it",
)
