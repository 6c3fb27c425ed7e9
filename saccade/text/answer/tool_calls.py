"""Tool calls in an answer's text, read as they come: `ToolCalls.feed`.

Owns the ways in which models write calls: within <tool_call> hermes (Qwen2.5, Qwen3-VL: JSON), XML
(Qwen3.5: <function=NAME> and <parameter=NAME>) and GLM's (<arg_key>); Mistral's and Llama 3's bare
JSON (`call_bare.py`); Gemma 4's own (`call_gemma.py`). Anything but a perfect call is text, and no
cutting of the answer changes the reading. White space around a call belongs to the call.
Knows nothing of HTTP, of tokens, or of running tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from saccade.text import call_gemma
from saccade.text.call_bare import BareCall
from saccade.text.call_gemma import GemmaCall
from saccade.text.call_glm import GlmCall
from saccade.text.call_json import JsonCall
from saccade.text.call_xml import XmlCall

Form = Literal["hermes", "xml", "glm", "mistral", "llama3", "gemma"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
ARGUMENTS = "[ARGS]"
"""Mistral's, between a tool's name and its arguments."""
TAGS = frozenset({OPEN, CLOSE, MISTRAL, ARGUMENTS, "[CALL_ID]", LLAMA}) | {
    call_gemma.OPEN,
    call_gemma.CLOSE,
    call_gemma.QUOTE,
}
"""Tags that are read where calls are, special tokens or not."""
OPENS: Mapping[Form, str] = {"mistral": MISTRAL, "llama3": LLAMA, "gemma": call_gemma.OPEN}
"""The tag that opens a call, where it is not <tool_call>."""
_SPACE = " \t\r\n"
_MAX_RESCANS = 4
"""Broken calls of one answer in which calls are looked for again: each costs their length."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of the tool `name`; its index counts every started call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is whole."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A started call (only if `eager`) turns out to be none: all of it follows as text."""

    index: int


Event = Text | CallStarted | CallArguments | CallEnded | CallBroken


class _Reader(Protocol):
    """The reader of one call, from behind <tool_call>."""

    name: str | None

    @property
    def done(self) -> bool: ...

    @property
    def certain(self) -> bool:
        """True once the name and the beginning of the arguments have come, in this order."""
        ...

    def feed(self, character: str) -> bool:
        """False: the text is no call, and `character` is not part of it."""
        ...

    def skip(self, data: str, at: int) -> int:
        """Take the characters of `data` from `at` on that only lengthen a string, in one go; the
        index of the first that does more.
        """
        ...

    def take(self) -> str:
        """The arguments that have come since."""
        ...


class ToolCalls:
    """Reads one answer, or one part of it."""

    def __init__(
        self,
        form: Form,
        tools: Mapping[str, Any],
        *,
        eager: bool = False,
        first: int = 0,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`tools`: the schema of each tool's parameters, by name, which gives types to XML.

        eager: False: a call is told once complete and right, so that nothing has to be taken back.
        True: as it comes; certain if a grammar holds the model to calls, otherwise a call may turn
        out to be broken. first: index of the first call.
        """
        self._form = form
        self._tools = tools
        self._eager = eager
        self._next = first
        self._make_id = make_id or (_nine_characters if form == "mistral" else _any_id)
        self._open = OPENS.get(form, OPEN)
        self._held = ""  # white space and the beginning of a tag, which may yet belong to a call
        self._after_call = False
        self._bare = form == "llama3"  # an object would be a call, for nothing stands before it
        self._rescans = 0
        self._call: _Reader | None = None
        self._gap = ""  # white space before the call being read
        self._tag = ""  # that the call being read has begun with
        self._raw: list[str] = []  # the call being read, from behind its tag
        self._started = False

    @property
    def started(self) -> int:
        """The index that the next call will have."""
        return self._next

    @property
    def within(self) -> bool:
        """True between the start and the end of a call."""
        return self._call is not None and self._started

    def feed(self, text: str) -> list[Event]:
        """The events made certain by `text`."""
        events: list[Event] = []
        data = text
        while data:
            data = (
                self._read_text(data, events)
                if self._call is None
                else self._read_call(data, events)
            )
        if self._started and self._call is not None:
            self._tell_arguments(self._call, events)
        return events

    def end(self) -> list[Event]:
        """The events left when the answer ends: an incomplete call is text."""
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
            self._tell_text(held, events)
        return events

    def _read_text(self, data: str, events: list[Event]) -> str:
        """Read text up to a call's tag; the rest of `data`."""
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
            self._tell_text(data[:cut], events)
            return ""
        cut = len(data[:at].rstrip(_SPACE))
        self._tell_text(data[:cut], events)
        self._begin_call(data[cut:at], self._open)
        return data[at + len(self._open) :]

    def _begin_call(self, gap: str, tag: str) -> None:
        self._gap, self._tag = gap, tag
        self._raw = []
        self._started = False
        match self._form:
            case "hermes":
                self._call = JsonCall(CLOSE)
            case "xml":
                self._call = XmlCall(CLOSE, self._tools)
            case "glm":
                self._call = GlmCall(CLOSE, self._tools)
            case "gemma":
                self._call = GemmaCall()
            case _:
                self._call = BareCall(self._form)

    def _read_call(self, data: str, events: list[Event]) -> str:
        """Read on in a call; the rest of `data`."""
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
                if isinstance(call, BareCall) and (following := call.following()) is not None:
                    self._begin_call("", "")
                    self._call = following
                return data[at + 1 :]
        self._raw.append(data)
        return ""

    def _end_call(self, call: _Reader, events: list[Event]) -> None:
        if not self._started:
            self._start(call, events)
        self._tell_arguments(call, events)
        events.append(CallEnded(self._next - 1))

    def _start(self, call: _Reader, events: list[Event]) -> None:
        assert call.name is not None
        events.append(CallStarted(self._next, self._make_id(), call.name))
        self._next += 1
        self._started = True

    def _break(self, events: list[Event], rest: str) -> str:
        """Turn a supposed call into text; returns the text to read (again) after its tag."""
        if self._started:
            events.append(CallBroken(self._next - 1))
        self._call, self._started = None, False
        raw, self._raw = "".join(self._raw), []
        if not self._tag:  # no call was sure to be there
            return self._gap + raw + rest
        again = self._open in raw and self._rescans < _MAX_RESCANS
        self._rescans += again
        self._tell_text(self._gap + self._tag + ("" if again else raw), events)
        return raw + rest if again else rest

    def _tell_arguments(self, call: _Reader, events: list[Event]) -> None:
        if piece := call.take():
            events.append(CallArguments(self._next - 1, piece))

    def _tell_text(self, text: str, events: list[Event]) -> None:
        if text:
            self._after_call = False
            events.append(Text(text))


def _any_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """Mistral's templates take no other ids."""
    return secrets.token_hex(5)[:9]


def _begun(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that begin `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
