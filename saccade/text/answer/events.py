"""The events into which a response is parsed: reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text of the response."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of the tool `name` has started. `index` counts the started calls of the response from
    0.

    toolset: the client's group of tools that it belongs to, if any.
    """

    index: int
    id: str
    name: str
    toolset: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a tool call's arguments. All fragments together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A tool call that was reported while it arrived is invalid. All of its text follows as
    `Text`.
    """

    index: int


Event = Text | CallStarted | CallArguments | CallEnded | CallBroken


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A part of the reasoning."""

    text: str


AnswerEvent = Event | Reasoned
