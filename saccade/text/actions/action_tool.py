"""A client's computer or browser, as a model may act on it."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.text.actions.action import Point
from saccade.text.actions.vocabulary import ActionWords
from saccade.text.grammar.tools import ToolSet

ACT = {"type": "act"}
"""The tool choice that asks for an action, and an action among tools that are allowed."""


@dataclass(frozen=True, slots=True)
class ActionTool:
    """A computer or a browser that a request offers.

    name: what the client calls it. place: where it stands in the request. writes: the client's
    words on offer. toolset: calls in answers say that they belong to it. display: (width, height)
    that coordinates count, if the client says so. The newest screenshot's size counts otherwise.
    offered: False if the history alone knows it. beside: the request's functions, and its choice
    among all. `ACT` chooses an action.
    """

    name: str
    place: str
    writes: ActionWords
    toolset: str = ""
    display: Point | None = None
    offered: bool = True
    beside: ToolSet = ToolSet()  # noqa: RUF009 - frozen
