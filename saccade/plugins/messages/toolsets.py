"""Anthropic's computers and browsers: their action formats and tools.

computer_20241022, _20250124, _20251124   one tool, `computer`, with an `action`
computer_toolset_20260801                 a separate call for each action
browser_toolset_20260801                  the same, and functions such as `navigate`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from saccade.core.errors import InvalidRequest
from saccade.front.breakpoints import CacheControl
from saccade.front.fields import Reader
from saccade.front.unread_fields import AnyFields
from saccade.plugins.computer.action import MAX_PIXELS
from saccade.plugins.computer.action_tool import ActionTool, PastAction
from saccade.plugins.computer.vocabulary import ActionWords, ClientFunction, Word
from saccade.plugins.computer.word_fields import (
    MAX_REPEATED,
    MAX_SECONDS,
    Amount,
    Chord,
    PointPair,
    Region,
    Target,
    Texts,
    Wheel,
)

COMPUTER, BROWSER = "computer", "browser"

# ---- actions: the computer's

_AT = PointPair("coordinate", required=False)
_HELD = Chord("text", "x11", "+", required=False)
_KEYS = Chord("text", "x11", "+")
_REPEAT = Amount("repeat", "repeat", MAX_REPEATED, required=False)
_DURATION = Amount("duration", "seconds", MAX_SECONDS)
_CLICKS: Mapping[str, Mapping[str, Any]] = {
    "left_click": {},
    "right_click": {"button": "right"},
    "middle_click": {"button": "middle"},
    "double_click": {"count": 2},
    "triple_click": {"count": 3},
}
_COMPUTER: Mapping[str, Word] = {
    "key": Word("key", (_KEYS, _REPEAT)),
    "hold_key": Word("hold", (_KEYS, _DURATION)),
    "type": Word("type", (Texts("text", "text"),)),
    "cursor_position": Word("cursor"),
    "mouse_move": Word("move", (PointPair("coordinate"),)),
    "left_mouse_down": Word("press"),
    "left_mouse_up": Word("release"),
    **{name: Word("click", (_AT, _HELD), fixed) for name, fixed in _CLICKS.items()},
    "left_click_drag": Word(
        "drag", (PointPair("start_coordinate"), PointPair("coordinate"), _HELD)
    ),
    "scroll": Word("scroll", (_AT, Wheel("scroll_direction", "scroll_amount"), _HELD)),
    "wait": Word("wait", (_DURATION,)),
    "screenshot": Word("screenshot"),
    "zoom": Word("zoom", (Region("region"),)),
}
_FIRST = ("scroll", "hold_key", "left_mouse_down", "left_mouse_up", "triple_click", "wait", "zoom")
"""Names of actions that computer_20241022 does not have."""
_LACKED: Mapping[str, tuple[str, ...]] = {
    "computer_20241022": _FIRST,
    "computer_20250124": ("zoom",),
    "computer_20251124": (),
}

# ---- actions: the browser's

_TAB = Texts("tab_id", "tab", required=False)
_HERE = Target("target", element=False)
_MODIFIERS = Chord("modifiers", "x11", "+", required=False)
_PAUSE = Amount("duration", "seconds", 30, whole=False)
_BROWSER: Mapping[str, Word] = {
    "screenshot": Word("screenshot", (_TAB,)),
    "zoom": Word("zoom", (Region("region"), _TAB)),
    **{
        name: Word("click", (Target("target"), _MODIFIERS, _TAB), fixed)
        for name, fixed in _CLICKS.items()
    },
    "mouse_move": Word("move", (_HERE, _TAB)),
    "hover": Word("move", (Target("target"), _TAB)),
    "left_click_drag": Word("drag", (Target("from", element=False), _HERE, _TAB)),
    "left_mouse_down": Word("press", (_HERE, _TAB)),
    "left_mouse_up": Word("release", (_HERE, _TAB)),
    "scroll": Word("scroll", (_HERE, Wheel("scroll_direction", "scroll_amount"), _TAB)),
    "type": Word("type", (Texts("text", "text"), _TAB)),
    "key": Word("key", (_KEYS, _REPEAT, _TAB)),
    "hold_key": Word("hold", (_KEYS, _PAUSE, _TAB)),
    "wait": Word("wait", (_PAUSE, _TAB)),
}
_STRING: Mapping[str, Any] = {"type": "string"}
_ELEMENT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "ref"}, "ref": _STRING},
    "required": ["type", "ref"],
    "additionalProperties": False,
}
_NAMES: Mapping[str, Any] = {"type": "array", "items": _STRING, "maxItems": 16}


def _function(about: str, needs: Sequence[str] = (), **properties: Any) -> ClientFunction:
    """Return a function that belongs to a toolset.

    about: its description.
    needs: its required properties.
    properties: the schemas of its properties.
    """
    tab = {} if "tab_id" in properties else {"tab_id": _STRING}
    schema = {
        "type": "object",
        "properties": {**properties, **tab},
        "required": [*needs],
        "additionalProperties": False,
    }
    return ClientFunction(about, schema)


_NO_FIELDS = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTIONS: Mapping[str, ClientFunction] = {
    "navigate": _function('Go to a URL, or "back", "forward" or "reload".', ["url"], url=_STRING),
    "list_tabs": ClientFunction("List the open tabs.", _NO_FIELDS),
    "new_tab": ClientFunction("Open an empty tab.", _NO_FIELDS),
    "switch_tab": _function("Make a tab the active one.", ["tab_id"], tab_id=_STRING),
    "close_tab": _function("Close a tab.", ["tab_id"], tab_id=_STRING),
    "read_page": _function(
        "Read the page as a tree of elements with references, such as ref_7.",
        filter={"enum": ["all", "interactive"]},
        depth={"type": "integer", "minimum": 1, "maximum": 100},
        ref=_STRING,
    ),
    "get_page_text": _function("Read the page's text."),
    "read_console": _function("Read what the console has logged."),
    "read_network": _function("Read which requests the page has made."),
    "find": _function(
        "Find elements by a description. Returns references.", ["query"], query=_STRING
    ),
    "form_input": _function(
        "Set a form element, by its reference.",
        ["target", "value"],
        target=_ELEMENT,
        value={"type": ["string", "number", "boolean"]},
    ),
    "file_upload": _function(
        "Choose files in a file input, by its reference.",
        ["target"],
        target=_ELEMENT,
        paths=_NAMES,
        document_ids=_NAMES,
    ),
    "scroll_to": _function("Scroll an element into view.", ["target"], target=_ELEMENT),
    "javascript_exec": _function("Run JavaScript in the page.", ["text"], text=_STRING),
}
_OFF = frozenset({"file_upload", "read_console", "read_network", "javascript_exec"})
"""Functions of a toolset that are available only if `configs` enables them."""

SINGLE = ActionWords(_COMPUTER, COMPUTER)
FAMILIES: Mapping[str, ActionWords] = {
    COMPUTER: ActionWords(_COMPUTER),
    BROWSER: ActionWords(_BROWSER, functions=_FUNCTIONS),
}
"""The action format of each toolset, by the name that its calls have."""
TOOLSETS: Mapping[str, str] = {
    "computer_toolset_20260801": COMPUTER,
    "browser_toolset_20260801": BROWSER,
}
ACTION_TYPES = (*_LACKED, *TOOLSETS)

# ---- tools

Side = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


class ComputerDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A computer that the client controls, as one tool."""

    type: Literal["computer_20241022", "computer_20250124", "computer_20251124"]
    name: Literal["computer"]
    display_width_px: Side
    """The display's width in pixels, the unit of coordinates."""
    display_height_px: Side
    """The display's height in pixels."""
    display_number: int | None = None
    """Accepted and ignored."""
    enable_zoom: bool | None = None
    """Whether the model may zoom into a part of the screen."""
    allowed_callers: list[Literal["direct"]] | None = None
    """Must be direct: the model calls the tool itself."""
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = None
    """Must be false: the model always sees all tools."""
    strict: bool | None = None
    input_examples: list[Any] | None = None
    """Accepted, but not shown to the model."""


class MemberConfig(Struct, forbid_unknown_fields=True):
    """Settings of one member of a toolset."""

    enabled: bool | None = None
    """If false, the model cannot use it."""
    defer_loading: Literal[False] | None = None
    """Must be false: the model always sees all members."""


class ToolsetDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """A computer or a browser that the client controls, as a set of tools."""

    type: Literal["computer_toolset_20260801", "browser_toolset_20260801"]
    configs: dict[str, MemberConfig | None] | None = None
    """Settings of members by name."""
    cache_control: CacheControl | None = None


class BrowserTab(AnyFields):
    """An open tab."""

    tab_id: str
    """The client's ID of the tab."""
    title: str
    """The page's title, which may be empty."""
    url: str
    """The page's URL, which may be empty."""
    active: bool = False
    """Whether this is the tab for actions without a tab_id."""


class BrowserState(AnyFields, tag_field="type", tag="browser_state"):
    """The browser's tabs after a call. The model reads them as text."""

    tabs: list[BrowserTab]
    """All open tabs."""
    state_changes: list[dict[str, Any]] | None = None
    """Tabs that were opened, and downloads."""
    cache_control: CacheControl | None = None

    def text(self) -> str:
        """Return the text that the model reads."""
        tabs = [
            f"- {each.tab_id}{' (active)' if each.active else ''}: {each.title} {each.url}".rstrip()
            for each in self.tabs
        ]
        changes = [
            " ".join(f"{name}={value}" for name, value in each.items())
            for each in self.state_changes or ()
        ]
        lines = ["Open tabs:", *tabs] if tabs else ["No tab is open."]
        return "\n".join([*lines, *(["Changes:", *changes] if changes else ())])


_SINGLE: Reader[ComputerDefinition] = Reader(ComputerDefinition)
_TOOLSET: Reader[ToolsetDefinition] = Reader(ToolsetDefinition)


def acts(kind: str | None) -> bool:
    """Return True if a tool of this type is a computer or a browser."""
    return kind in ACTION_TYPES


@dataclass(frozen=True, slots=True)
class GivenTool:
    """A computer or browser that a request declares, and its cache breakpoint."""

    tool: ActionTool
    mark: CacheControl | None


def read_action_tool(raw: msgspec.Raw, kind: str, place: str) -> GivenTool:
    """Parse the declaration of a computer or browser. Raises InvalidRequest with the field."""
    if kind in _LACKED:
        single = _SINGLE.json(raw, place)
        lacked = {*_LACKED[kind], *(() if single.enable_zoom else ("zoom",))}
        words = {name: word for name, word in _COMPUTER.items() if name not in lacked}
        display = single.display_width_px, single.display_height_px
        writes = ActionWords(words, COMPUTER)
        tool = ActionTool(COMPUTER, place, writes, display=display)
        return GivenTool(tool, single.cache_control)
    given = _TOOLSET.json(raw, place)
    family = TOOLSETS[kind]
    all_words = FAMILIES[family]
    enabled = _enabled(given.configs or {}, all_words, f"{place}.configs")
    writes = ActionWords(
        {name: word for name, word in all_words.words.items() if name in enabled},
        functions={name: each for name, each in all_words.functions.items() if name in enabled},
    )
    return GivenTool(ActionTool(family, place, writes, family), given.cache_control)


def _enabled(
    configs: Mapping[str, MemberConfig | None], words: ActionWords, place: str
) -> frozenset[str]:
    members = {*words.words, *words.functions}
    if unknown := sorted(configs.keys() - members):
        where = f"{place}.{unknown[0][:100]}"
        raise InvalidRequest(f"{where}: expected one of {', '.join(sorted(members))}", where)
    on = {name: name not in _OFF for name in members}
    on |= {
        name: each.enabled
        for name, each in configs.items()
        if each is not None and each.enabled is not None
    }
    return frozenset(name for name, enabled in on.items() if enabled)


def read_past(
    name: str,
    arguments: Mapping[str, Any],
    toolset: str | None,
    tool: ActionTool | None,
    place: str,
) -> PastAction | None:
    """Return the computer or browser action of an earlier call, or None if it called a function.

    Raises InvalidRequest with the location of an error.
    """
    if toolset is not None and toolset in FAMILIES:
        words = FAMILIES[toolset]
        if not words.names(name):
            where = f"{place}.name"
            raise InvalidRequest(f"{where}: {name[:100]!r} is not in {toolset}'s toolset", where)
    elif tool is not None and not tool.toolset and name == COMPUTER:
        words = SINGLE
    else:
        return None
    where = f"{place}.input"
    return PastAction(words.read(name, arguments, where), words, where)
