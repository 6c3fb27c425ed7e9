"""Parses tool calls in the text of a response incrementally, in any format (`tool_format.py`).

Text that is not a valid call is returned as text. The result does not depend on how the text is
divided into updates. White space around a call is removed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saccade.text.answer.events import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Event,
    Text,
)
from saccade.text.answer.tool_format import CallReader, ToolFormat

_SPACE = " \t\r\n"
_MAX_RESCANS = 4
"""How many invalid calls in a response are searched for other calls, because each search takes
time.
"""


class ToolCalls:
    """Finds and parses the tool calls in one response, or in a part of it."""

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Any],
        *,
        eager: bool = False,
        first: int = 0,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """Start a response, or a part of it.

        tools: the schema of each tool's parameters, by name.
        first: index of the first call.
        eager: report calls while they arrive, instead of when they are complete and valid. A
            reported call may then turn out to be invalid, unless a grammar ensures valid calls.
        """
        self._form = form
        self._tools = tools
        self._eager = eager
        self._next = first
        self._make_id = make_id or form.syntax.make_id
        self._open = form.opens
        self._held = ""  # white space and the start of a tag, which may belong to a call
        self._after_call = False
        self._bare = form.bare  # an object at the start of the response is a call
        self._rescans = 0
        self._call: CallReader | None = None
        self._gap = ""  # white space before the call being read
        self._tag = ""  # the tag before the call being read
        self._raw: list[str] = []  # the text of the call being read, after its tag
        self._started = False

    @property
    def started(self) -> int:
        """The index that the next call will have."""
        return self._next

    @property
    def within(self) -> bool:
        """True while a reported call has not ended."""
        return self._call is not None and self._started

    def feed(self, text: str) -> list[Event]:
        """Parse text, and return the events that are now complete."""
        events: list[Event] = []
        data = text
        while data:
            data = (
                self._read_text(data, events)
                if self._call is None
                else self._read_call(data, events)
            )
        if self._started and self._call is not None:
            self._emit_arguments(self._call, events)
        return events

    def end(self) -> list[Event]:
        """Return the remaining events at the end of the response. An incomplete call is returned as
        text.
        """
        events: list[Event] = []
        while self._call is not None:
            data = self._break(events, "")
            while data:
                data = (
                    self._read_text(data, events)
                    if self._call is None
                    else self._read_call(data, events)
                )
        held, self._held = self._held, ""
        if held.strip(_SPACE) or not self._after_call:
            self._emit_text(held, events)
        return events

    def _read_text(self, data: str, events: list[Event]) -> str:
        data, self._held = self._held + data, ""
        if self._bare and (text := data.lstrip(_SPACE)):
            self._bare = False
            if text[0] == "{":
                self._begin_call(data[: len(data) - len(text)], "")
                return text
        at = data.find(self._open)
        if at < 0:
            cut = len(data) - _begun(data, self._open)
            cut = len(data[:cut].rstrip(_SPACE))
            self._held = data[cut:]
            self._emit_text(data[:cut], events)
            return ""
        cut = len(data[:at].rstrip(_SPACE))
        self._emit_text(data[:cut], events)
        self._begin_call(data[cut:at], self._open)
        return data[at + len(self._open) :]

    def _begin_call(self, gap: str, tag: str) -> None:
        self._gap, self._tag = gap, tag
        self._raw = []
        self._started = False
        self._call = self._form.syntax.reader(self._tools)

    def _read_call(self, data: str, events: list[Event]) -> str:
        call = self._call
        assert call is not None
        at = -1
        while (at := call.skip(data, at + 1)) < len(data):
            if not call.feed(data[at]):
                self._raw.append(data[:at])
                return self._break(events, data[at:])
            if call.certain and self._eager and not self._started:
                self._start(call, events)
            if call.done:
                if call.name is not None:
                    self._end_call(call, events)
                self._call, self._after_call = None, True
                if (following := self._form.syntax.following(call)) is not None:
                    self._begin_call("", "")
                    self._call = following
                return data[at + 1 :]
        self._raw.append(data)
        return ""

    def _end_call(self, call: CallReader, events: list[Event]) -> None:
        if not self._started:
            self._start(call, events)
        self._emit_arguments(call, events)
        events.append(CallEnded(self._next - 1))

    def _start(self, call: CallReader, events: list[Event]) -> None:
        assert call.name is not None
        events.append(CallStarted(self._next, self._make_id(), call.name))
        self._next += 1
        self._started = True

    def _break(self, events: list[Event], rest: str) -> str:
        """Treat the call being parsed as text, because it is invalid. Returns the text after its
        tag, to be parsed again.
        """
        if self._started:
            events.append(CallBroken(self._next - 1))
        self._call, self._started = None, False
        raw, self._raw = "".join(self._raw), []
        if not self._tag:  # text without a tag that started like a call
            return self._gap + raw + rest
        again = self._open in raw and self._rescans < _MAX_RESCANS
        self._rescans += again
        self._emit_text(self._gap + self._tag + ("" if again else raw), events)
        return raw + rest if again else rest

    def _emit_arguments(self, call: CallReader, events: list[Event]) -> None:
        if piece := call.take_arguments():
            events.append(CallArguments(self._next - 1, piece))

    def _emit_text(self, text: str, events: list[Event]) -> None:
        if text:
            self._after_call = False
            events.append(Text(text))


def _begun(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
