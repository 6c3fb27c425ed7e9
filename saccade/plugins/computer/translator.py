"""Translates tools, history and answers between a client's action format and a model's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from saccade.core.errors import InvalidRequest
from saccade.plugins.computer.action import Action, Point
from saccade.plugins.computer.action_format import ActionFormat, Words
from saccade.plugins.computer.action_tool import ActionTool
from saccade.plugins.computer.screen import THOUSANDTHS, Screen
from saccade.plugins.computer.vocabulary import ActionWords, placed
from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Text,
)
from saccade.text.answer.reader import EventReader
from saccade.text.grammar.json_size import extent
from saccade.text.grammar.tools import Tool

UNSEEN = Screen.in_thousandths((THOUSANDTHS, THOUSANDTHS))
"""The screen that is used while there is no screenshot."""
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ActionTranslator:
    """Translates actions between one client's tool and one model's action format."""

    form: ActionFormat
    tool: ActionTool
    in_pixels: bool  # whether the model's units are pixels of the image that it has seen
    words: Words = field(init=False)  # the available actions

    def __post_init__(self) -> None:
        can = self.tool.writes.can
        offered = {
            name: word if word.kind == "answer" else word.told_by(can)
            for name, word in self.form.vocabulary.words.items()
            if self.tool.offered and (word.kind == "answer" or can(word))
        }
        object.__setattr__(self, "words", offered)

    # ---- tools

    def tools(self, screen: Screen | None, must: bool) -> tuple[Tool, ...]:
        """Return the tools that the model sees and that constrain its answer.

        screen: None before the first screenshot, when actions cannot have a position.
        must: whether an action is required, so that the model may not end the task instead.
        """
        words = {
            name: word
            for name, word in self.words.items()
            if not (must and word.kind == "answer") and (screen is not None or not word.points)
        }
        tools = [*self._functions()]
        form, seen = self.form, screen or UNSEEN
        if not words:
            return tuple(tools)
        if form.describe is None:
            return (*(self._tool(name, word.schema(seen)) for name, word in words.items()), *tools)
        about, shown = form.describe(self.words, self._resolution(screen))
        key = form.vocabulary.key
        cases = tuple(word.schema(seen, key, name) for name, word in words.items())
        return (self._tool(form.vocabulary.tool, shown, about, cases), *tools)

    def _resolution(self, screen: Screen | None) -> str:
        if not self.in_pixels:
            return f"{THOUSANDTHS}x{THOUSANDTHS}"
        return "" if screen is None else f"{screen.x.units}x{screen.y.units}"

    def _functions(self) -> Iterator[Tool]:
        if self.tool.offered and self.form.written is None:
            for name, function in self.tool.writes.functions.items():
                yield self._tool(f"{self._prefix}{name}", {**function.schema}, function.about)

    def _tool(
        self, name: str, schema: dict[str, Any], about: str = "", cases: tuple[Any, ...] = ()
    ) -> Tool:
        size = extent(schema).characters + len(name) + len(about)
        place = self.tool.place
        return Tool(name, schema, True, place, place, about or None, size, cases)

    @property
    def _prefix(self) -> str:
        return f"{self.tool.name}_"

    # ---- history

    def told(self, action: Action, theirs: ActionWords, screen: Screen | None) -> list[Call]:
        """Translate a past action to calls in the model's format. If that is impossible, return it
        in the format `theirs`.
        """
        if action.kind == "call":
            return [(f"{self._prefix}{action.name}", {**action.arguments})]
        seen = screen or UNSEEN
        mapped = replace(action, path=tuple(map(seen.to_model, action.path)))
        words = self.form.vocabulary
        if (call := words.write(mapped)) is not None:
            return [call]
        if mapped.path and mapped.kind != "zoom":  # move the cursor there first
            rest = mapped.path[-1:] if mapped.kind == "drag" else ()
            moved = words.write(Action("move", mapped.path[:1]))
            done = words.write(replace(mapped, path=rest))
            if moved is not None and done is not None:
                return [moved, done]
        name, arguments = theirs.word(mapped)
        return [(words.tool, {words.key: name, **arguments}) if words.tool else (name, arguments)]

    # ---- answers

    def owns(self, name: str) -> bool:
        """Return True if a call with this name in an answer is for the client's tool."""
        return self.form.vocabulary.names(name) or self._member(name) is not None

    def _member(self, name: str) -> str | None:
        member = name.removeprefix(self._prefix)
        return member if name != member and member in self.tool.writes.functions else None

    def action(self, name: str, arguments: dict[str, Any], screen: Screen) -> Action:
        """Convert a model's call to an action. Raises InvalidRequest if it is invalid."""
        if (member := self._member(name)) is not None:
            return Action("call", name=member, arguments=arguments)
        action = self.form.vocabulary.read(name, arguments, "call")
        return replace(action, path=tuple(map(screen.to_screen, action.path)))

    def reader(
        self, inner: EventReader, screen: Screen | None, cursor: Point | None
    ) -> ActionReader:
        """Return a reader that translates the model's actions to the client's format."""
        return ActionReader(inner, self, screen or UNSEEN, cursor)


class ActionReader:
    """Reads an answer, and emits complete actions as calls in the client's format."""

    def __init__(
        self,
        inner: EventReader,
        translator: ActionTranslator,
        screen: Screen,
        cursor: Point | None,
    ) -> None:
        """Start reading an answer.

        cursor: the cursor's last position. By default, it is the middle of the screen.
        """
        self._inner = inner
        self._translator = translator
        self._screen = screen
        self._cursor = cursor or screen.middle
        self._next = 0  # index of the next call
        self._call: CallStarted | None = None  # the action being read
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events that `text` completes."""
        return self._told(self._inner.feed(text))

    def end(self) -> list[AnswerEvent]:
        """Return the remaining events at the end of the answer."""
        return self._told(self._inner.end())

    def _told(self, events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
        return [told for event in events for told in self._event(event)]

    def _event(self, event: AnswerEvent) -> list[AnswerEvent]:
        match event:
            case CallStarted(name=name) if self._translator.owns(name):
                self._call, self._pieces = event, []
                return []
            case CallArguments(text=text) if self._call is not None:
                self._pieces.append(text)
                return []
            case CallEnded() if (call := self._call) is not None:
                self._call = None
                return self._acted(call, "".join(self._pieces))
            case CallBroken() if self._call is not None:
                self._call = None
                return []
            case CallStarted():
                self._next += 1
                return [replace(event, index=self._next - 1)]
            case CallArguments() | CallEnded() | CallBroken():
                return [replace(event, index=self._next - 1)]
        return [event]

    def _acted(self, call: CallStarted, text: str) -> list[AnswerEvent]:
        tool = self._translator.tool
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
            action = self._translator.action(call.name, arguments, self._screen)
        except (InvalidRequest, msgspec.DecodeError, msgspec.ValidationError):
            return [Text(f"{call.name} {text}")]
        if action.kind == "answer":
            return [Text(action.text)]
        shown = (tool.writes.write(each) for each in placed(action, self._cursor))
        written = next((each for each in shown if each is not None), None)
        if written is None:
            return [Text(f"{call.name} {text}")]
        if action.path and action.kind != "zoom":
            self._cursor = action.path[-1]
        name, told = written
        index, self._next = self._next, self._next + 1
        return [
            CallStarted(index, call.id, name, tool.toolset),
            CallArguments(index, json.dumps(told, ensure_ascii=False)),
            CallEnded(index),
        ]
