"""What a request declares about its computer or browser, and the past actions on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from saccade.plugins.computer.action import Action, Point
from saccade.plugins.computer.vocabulary import ActionWords
from saccade.text.grammar.tools import ToolSet

ACT = {"type": "act"}
"""The tool choice that requires an action. In a list of allowed tools, it allows actions."""


@dataclass(frozen=True, slots=True)
class ActionTool:
    """The computer or browser that a request declares."""

    NAME: ClassVar[str] = "computer"
    name: str  # the client's name for it
    place: str  # its path in the request
    writes: ActionWords  # the client's action format
    toolset: str = ""  # the toolset that calls in answers refer to
    # (width, height) of the coordinates, if the client sets it; otherwise, the size of the latest
    # screenshot is used
    display: Point | None = None
    offered: bool = True  # False if it occurs only in the history
    # the request's functions and its tool choice, which may be `ACT`
    beside: ToolSet = ToolSet()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class PastAction:
    """The action of an earlier call, the format it was written in, and its path in the body."""

    action: Action
    words: ActionWords
    place: str


@dataclass(frozen=True, slots=True)
class PastActions:
    """The past actions in a message, by the index of their call."""

    NAME: ClassVar[str] = "computer.past"
    by_call: Mapping[int, PastAction] = field(default_factory=dict)


NO_ACTIONS = PastActions()
