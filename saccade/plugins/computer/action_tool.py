"""A client's computer or browser, as a model may act on it, and what was done to it before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from saccade.plugins.computer.action import Action, Point
from saccade.plugins.computer.vocabulary import ActionWords
from saccade.text.grammar.tools import ToolSet

ACT = {"type": "act"}
"""The tool choice that asks for an action, and an action among tools that are allowed."""


@dataclass(frozen=True, slots=True)
class ActionTool:
    """A computer or a browser that a request offers."""

    NAME: ClassVar[str] = "computer"
    name: str  # what the client calls it
    place: str  # its field path in the request
    writes: ActionWords  # the client's actions
    toolset: str = ""  # calls in answers refer to it
    # (width, height) of the coordinates, if the client sets it. The newest screenshot's size
    # is used otherwise.
    display: Point | None = None
    offered: bool = True  # False if the history alone knows it
    # the request's functions, and its choice among all. `ACT` chooses an action.
    beside: ToolSet = ToolSet()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class PastAction:
    """What a call in history did to a screen, in whose words, and its place in the body."""

    action: Action
    words: ActionWords
    place: str


@dataclass(frozen=True, slots=True)
class PastActions:
    """What a message's calls did to a screen, by their index among the calls."""

    NAME: ClassVar[str] = "computer.past"
    by_call: Mapping[int, PastAction] = field(default_factory=dict)


NO_ACTIONS = PastActions()
