"""What an answer is read as: reasoning, text, and calls as they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call to the tool `name` has started. Its index counts every started call.

    toolset: the client's set of tools that it belongs to, if any.
    """

    index: int
    id: str
    name: str
    toolset: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. Together, the pieces are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is whole."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A started call (only if `eager`) turns out to be none. All its text follows as text."""

    index: int


Event = Text | CallStarted | CallArguments | CallEnded | CallBroken


@dataclass(frozen=True, slots=True)
class Reasoned:
    """Text of the reasoning."""

    text: str


AnswerEvent = Event | Reasoned
