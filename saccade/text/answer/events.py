"""The events that a response is parsed to: reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the response."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call to the tool `name` has started. Indices count all calls that started.

    toolset: the client's set of tools that it belongs to, if any.
    """

    index: int
    id: str
    name: str
    toolset: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a tool call's arguments. The fragments, joined, are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that was reported while it arrived is invalid. All its text follows as `Text`."""

    index: int


Event = Text | CallStarted | CallArguments | CallEnded | CallBroken


@dataclass(frozen=True, slots=True)
class Reasoned:
    """Text of the reasoning."""

    text: str


AnswerEvent = Event | Reasoned
