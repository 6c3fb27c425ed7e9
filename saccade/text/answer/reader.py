"""Parses a response incrementally into reasoning, text and tool calls.

Reasoning comes first. Calls may be in the reasoning or in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from saccade.text.answer.answer_format import CALL_TAGS
from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Event,
    Reasoned,
    Text,
)
from saccade.text.answer.reasoning import THINK, Piece, Reasoning, Tags, Where

if TYPE_CHECKING:
    from saccade.text.answer.tool_calls import ToolCalls
    from saccade.text.answer.tool_format import ToolFormat


class EventReader(Protocol):
    """Parses one response into events."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Parse text, and return the events that are now complete."""
        ...

    def end(self) -> list[AnswerEvent]:
        """Return the remaining events at the end of the response."""
        ...


@dataclass(frozen=True, slots=True)
class ReadAs:
    """How to parse the response to a request."""

    # `reasoning_at` the prompt, for reasoning in `tags`; `None`: reasoning tags are text
    where: Where | None = None
    form: ToolFormat | None = None  # the tool-call format; `None`: calls are text
    tools: Mapping[str, Any] = field(default_factory=dict)  # each tool's schema, by name
    # a grammar ensures that calls are valid, so they are reported as they arrive
    certain: bool = False
    single: bool = False  # the response ends with its first call
    special: bool = False  # special tokens are included in the text by name
    with_stop: bool = False  # the stop string or token is included in the text
    tags: Tags = THINK
    translate: Callable[[EventReader], EventReader] | None = None  # wraps the parser

    def reader(self) -> EventReader:
        """Create a parser for one response."""
        certain = self.certain
        reader = AnswerReader(
            self.where, self.form, self.tools, eager=certain, certain=certain, tags=self.tags
        )
        return reader if self.translate is None else self.translate(reader)

    @property
    def read_tags(self) -> frozenset[str]:
        """Tags that must be in the text for the parser, even if they are special tokens."""
        reasoning = frozenset({self.tags.open, self.tags.close} if self.where else ())
        return reasoning if self.form is None else reasoning | CALL_TAGS


PLAIN = ReadAs()
"""Parses an entire response as text."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is a JSON object, possibly truncated at the end of the response."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete response, separated into text, reasoning and tool calls."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]


class AnswerReader:
    """Parses one response into reasoning, text and tool calls."""

    def __init__(
        self,
        where: Where | None,
        form: ToolFormat | None,
        tools: Mapping[str, Any],
        *,
        eager: bool = False,
        certain: bool = False,
        make_id: Callable[[], str] | None = None,
        tags: Tags = THINK,
    ) -> None:
        """Start a response.

        where: the result of `reasoning_at`; `None`: reasoning tags are text.
        form: the tool-call format; `None`: calls are text.
        tools, eager: as in `ToolCalls`.
        certain: a grammar ensures valid calls, so only the end of the response can make one
            invalid.
        """
        self._reasoning = None if where is None else Reasoning(where, tags)
        self._form = form
        self._tools = tools
        self._eager = eager
        self._certain = certain
        self._make_id = make_id
        self._reasons = self._reasoning is not None
        self._calls = self._reader(0)

    def feed(self, text: str) -> list[AnswerEvent]:
        """Parse text, and return the events that are now complete."""
        pieces = [Piece(text, False)] if self._reasoning is None else self._reasoning.feed(text)
        return self._events(pieces)

    def end(self) -> list[AnswerEvent]:
        """Return the remaining events at the end of the response.

        If `certain`, a truncated call gets no end event. Otherwise, an incomplete call is returned
        as text.
        """
        events = self._events([] if self._reasoning is None else self._reasoning.end())
        if self._calls is None or (self._certain and self._calls.within):
            return events
        return events + self._as_reasoning(self._calls.end())

    def _events(self, pieces: Sequence[Piece]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for piece in pieces:
            if self._reasons and not piece.reasoning:
                if self._calls is not None:
                    events += self._as_reasoning(self._calls.end())
                self._reasons = False
                self._calls = self._reader(0 if self._calls is None else self._calls.started)
            read = [Text(piece.text)] if self._calls is None else self._calls.feed(piece.text)
            events += self._as_reasoning(read)
        return events

    def _as_reasoning(self, events: Sequence[Event]) -> list[AnswerEvent]:
        return [
            Reasoned(event.text) if self._reasons and isinstance(event, Text) else event
            for event in events
        ]

    def _reader(self, first: int) -> ToolCalls | None:
        if self._form is None:
            return None
        from saccade.text.answer.tool_calls import ToolCalls

        # A grammar does not constrain reasoning.
        eager = self._eager and not (self._certain and self._reasons)
        return ToolCalls(self._form, self._tools, eager=eager, first=first, make_id=self._make_id)


def gather(events: Sequence[AnswerEvent]) -> WholeAnswer:
    """Combine the events of a response. A truncated call has incomplete arguments."""
    text, reasoning = list[str](), list[str]()
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for event in events:
        match event:
            case Text():
                text.append(event.text)
            case Reasoned():
                reasoning.append(event.text)
            case CallStarted():
                calls[event.index] = (event.id, event.name, [])
            case CallArguments():
                calls[event.index][2].append(event.text)
            case CallBroken():
                del calls[event.index]
            case CallEnded():
                pass
    whole = tuple(Call(i, name, "".join(pieces)) for i, name, pieces in calls.values())
    return WholeAnswer("".join(text), "".join(reasoning), whole)
