"""OpenAI's computer tool: its action format, its items, and its declaration.

The tool's type is `computer`, or one of the older names `computer_use_preview` and `computer_use`.
A call to `computer` has several actions (`actions`), and a call to `computer_use_preview` has one
(`action`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader
from saccade.plugins.computer.action import MAX_PIXELS
from saccade.plugins.computer.action_tool import ActionTool, PastAction
from saccade.plugins.computer.vocabulary import ActionWords, Word
from saccade.plugins.computer.word_fields import Chord, Flat, OneOf, Points, Scrolled, Texts

COMPUTER = "computer"
TOOLS = (COMPUTER, "computer_use_preview", "computer_use")
"""The types of the tool in `tools` and `tool_choice`."""
MAX_ACTIONS = 100
"""Maximum number of actions in one call."""
_BUTTONS = {
    "left": "left",
    "right": "right",
    "wheel": "middle",
    "back": "back",
    "forward": "forward",
}
_HELD = Chord("keys", "openai", required=False)
WORDS = ActionWords(
    {
        "click": Word("click", (OneOf("button", "button", _BUTTONS), Flat(), _HELD)),
        "double_click": Word("click", (Flat(), _HELD), {"count": 2}),
        "drag": Word("drag", (Points("path"), _HELD)),
        "keypress": Word("key", (Chord("keys", "openai"),)),
        "move": Word("move", (Flat(), _HELD)),
        "screenshot": Word("screenshot"),
        "scroll": Word("scroll", (Flat(), Scrolled({"scroll_x": 0, "scroll_y": 1}), _HELD)),
        "type": Word("type", (Texts("text", "text"),)),
        "wait": Word("wait", drops=frozenset({"seconds"})),
    },
    COMPUTER,
    "type",
)

Side = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


class ComputerTool(Struct, forbid_unknown_fields=True):
    """A computer that the client controls. Coordinates are pixels of the latest screenshot."""

    type: Literal["computer", "computer_use"]


class PreviewTool(Struct, forbid_unknown_fields=True):
    """A computer, by its older name."""

    type: Literal["computer_use_preview"]
    display_width: Side
    """The display's width in pixels, the unit of coordinates."""
    display_height: Side
    """The display's height in pixels."""
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"] = "linux"


_COMPUTER: Reader[ComputerTool] = Reader(ComputerTool)
_PREVIEW: Reader[PreviewTool] = Reader(PreviewTool)


def read_computer(tools: Sequence[Mapping[str, Any]], acted: bool) -> ActionTool | None:
    """Return the computer tool that a request declares, or None.

    acted: True if the history contains calls to a computer. If none is declared, a default one is
    then returned.

    Raises InvalidRequest with the field.
    """
    found = None
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if not is_computer(tool):
            continue
        if found is not None:
            raise InvalidRequest(f"{place}: a request may have only one computer", place)
        display = None
        if tool["type"] == "computer_use_preview":
            preview = _PREVIEW.value(dict(tool), place)
            display = preview.display_width, preview.display_height
        else:
            _COMPUTER.value(dict(tool), place)
        found = ActionTool(COMPUTER, place, WORDS, COMPUTER, display)
    if found is None and acted:
        return ActionTool(COMPUTER, "tools", WORDS, offered=False)
    return found


def is_computer(tool: Mapping[str, Any]) -> bool:
    """Return True if a tool or a tool choice is a computer."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind in TOOLS


def acts_once(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if each call has a single action, as with the older name of the tool."""
    return any(tool.get("type") == "computer_use_preview" for tool in tools)


def read_actions(
    action: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]] | None, place: str
) -> list[PastAction]:
    """Parse the actions of a past call, from `actions` or from the older field `action`. Raises
    InvalidRequest with the location of an error.
    """
    if (action is None) == (actions is None):
        raise InvalidRequest(f"{place}: set either actions or action", place)
    given = [action] if actions is None else actions
    if not 1 <= len(given) <= MAX_ACTIONS:
        where = f"{place}.actions"
        raise InvalidRequest(
            f"{where}: a call must have 1 to {MAX_ACTIONS} actions, got {len(given)}", where
        )
    found = []
    for index, each in enumerate(given):
        where = f"{place}.action" if actions is None else f"{place}.actions[{index}]"
        found.append(PastAction(WORDS.read(COMPUTER, each or {}, where), WORDS, where))
    return found
