"""Writes an answer in the format of Anthropic's API: stream events in order, and messages.

A message consists of content blocks. At most one of them is open at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Reasoned,
    Text,
)

StreamEvent = dict[str, Any]
"""The data of one event. The event's name is its "type"."""
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
Ending = Literal["stop", "length", "context"]
"""Why the answer ended. context: the context was full before the client's limit was reached."""


_BESIDE = {
    "cached_tokens_by_tier": "cache_read_input_tokens_by_tier",
    "prepared_tokens": "prepared_input_tokens",
    "prepared_in_vain_tokens": "prepared_in_vain_input_tokens",
}
"""Maps the names of a chat's usage to Anthropic's style."""


@dataclass(frozen=True, slots=True)
class MessageUsage:
    """Token counts."""

    fresh: int  # prompt tokens that were neither cached nor stored at a breakpoint
    written: int  # prompt tokens stored at a breakpoint
    read: int  # prompt tokens read from the cache
    output: int
    hour: int = 0  # the part of `written` that is stored for an hour or more
    beside: Mapping[str, Any] = field(default_factory=dict)  # other fields of a chat's usage

    def body(self) -> dict[str, Any]:
        """Return the counts in the format of `usage`."""
        return {
            "input_tokens": self.fresh,
            "cache_creation_input_tokens": self.written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": self.written - self.hour,
                "ephemeral_1h_input_tokens": self.hour,
            },
            "cache_read_input_tokens": self.read,
            **{_BESIDE[name]: value for name, value in self.beside.items()},
            "output_tokens": self.output,
        }


class MessageStream:
    """Writes the stream of one answer. Call `opening_events`, then `feed`, then `closing_events`.

    shows_thinking: send the reasoning instead of only its signature.
    """

    def __init__(self, message_id: str, model: str, shows_thinking: bool = True) -> None:
        self._id = message_id
        self._model = model
        self._shows_thinking = shows_thinking
        self._index = -1  # of the open block, or else of the last one
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._signature = hashlib.blake2b(digest_size=16)
        self._called = False

    def opening_events(
        self, usage: MessageUsage, diagnostics: dict[str, Any] | None = None
    ) -> list[StreamEvent]:
        """Return the events before the first token.

        diagnostics: the reason for a cache miss, if the client requested it.
        """
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage.body(),
        }
        if diagnostics is not None:
            message["diagnostics"] = diagnostics
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def feed(self, events: Iterable[AnswerEvent]) -> list[StreamEvent]:
        """Return the events for new content."""
        return [sent for event in events for sent in self._feed(event)]

    def closing_events(
        self,
        finish: Ending,
        stop: str | None,
        usage: MessageUsage,
        edited: dict[str, Any] | None = None,
    ) -> list[StreamEvent]:
        """Return the events after the last token.

        stop: the stop sequence that ended the answer.
        edited: the effect of the request's edits, if it has any.
        """
        reason = self._reason(finish, stop)
        delta = {
            "stop_reason": reason,
            "stop_sequence": stop if reason == "stop_sequence" else None,
        }
        more = {} if edited is None else {"context_management": edited}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": usage.body(), **more},
            {"type": "message_stop"},
        ]

    def _reason(self, finish: Ending, stop: str | None) -> StopReason:
        if finish != "stop":
            return "max_tokens" if finish == "length" else "model_context_window_exceeded"
        if stop is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _feed(self, event: AnswerEvent) -> list[StreamEvent]:
        match event:
            case Text(text):
                opened = self._enter("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case Reasoned(text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                opened = self._enter("thinking", empty)
                self._signature.update(text.encode(errors="replace"))
                if not self._shows_thinking:
                    return opened
                return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]
            case CallStarted(_, call_id, name, toolset):
                block: dict[str, Any] = {
                    "type": "tool_use",
                    "id": call_id,
                    "name": name,
                    "input": {},
                }
                if toolset:
                    block |= {"toolset_name": toolset, "caller": {"type": "direct"}}
                return [*self._close(), *self._enter("tool_use", block)]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnded():
                self._called = True
                return self._close()
            case CallBroken():
                return self._close()

    def _enter(
        self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]
    ) -> list[StreamEvent]:
        """Close the open block and open a new one, unless a block of the same type is open. Returns
        the events.
        """
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closed, start]

    def _close(self) -> list[StreamEvent]:
        if self._open is None:
            return []
        last = []
        if self._open == "thinking":
            signature = self._signature.hexdigest()
            last = [self._delta({"type": "signature_delta", "signature": signature})]
        self._open = None
        return [*last, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class WholeMessage:
    """Builds a complete message from the events of a stream, for clients that do not stream."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[tuple[str, list[str]]] = []  # for each block, a field and its text

    def add_event(self, event: StreamEvent) -> None:
        match event["type"]:
            case "message_start":
                self._message = dict(event["message"])
            case "content_block_start":
                block = event["content_block"]
                kind = block["type"]
                self._blocks.append(block)
                self._pieces.append(("input" if kind == "tool_use" else kind, []))
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    self._blocks[event["index"]] |= {"signature": delta["signature"]}
                else:
                    name = delta["type"].removesuffix("_delta")
                    text = delta["partial_json" if name == "input_json" else name]
                    self._pieces[event["index"]][1].append(text)
            case "message_delta":
                self._message |= event["delta"]
                for name in ("usage", "context_management"):
                    if name in event:
                        self._message[name] = event[name]

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        content = []
        for block, (name, pieces) in zip(self._blocks, self._pieces, strict=True):
            text = "".join(pieces)
            value = read_input(text) if name == "input" else text
            content.append({**block, name: value})
        return {**self._message, "content": content}


def read_input(text: str) -> Any:
    """Parse the JSON input of a call. If the answer's length limit has truncated the JSON, parse
    its longest complete part, as the SDKs do in a stream.
    """
    try:
        return _parsed(text or "{}")
    except json.JSONDecodeError:
        return _parsed(whole_part(text))
    except RecursionError:
        return {}


def _parsed(text: str) -> Any:
    return _tellable(json.loads(text, parse_int=_number, parse_float=_number))


def _number(word: str) -> Any:
    """Parse a number. A number that JSON readers may not support is returned as raw JSON."""
    value: int | float = int(word) if word.lstrip("-").isdigit() else float(word)
    fits = -(2**63) <= value < 2**64 if isinstance(value, int) else math.isfinite(value)
    return value if fits else msgspec.Raw(word.encode())


def _tellable(value: Any) -> Any:
    """Return `value` with lone surrogates replaced. JSON can escape them, but UTF-8 cannot encode
    them.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_tellable(key): _tellable(each) for key, each in value.items()}
    return [_tellable(each) for each in value] if isinstance(value, list) else value


def whole_part(text: str) -> str:
    """Return the longest prefix of a JSON document that ends after a value, with all open brackets
    closed.

    text: the start of an object or a list.
    """
    closers: list[str] = []
    best, closing = 0, "{}"
    in_string = escaped = is_value = False
    for index, character in enumerate(text):
        end = index + 1
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
            if in_string or not is_value:
                continue
        elif character == '"':
            in_string = True
            continue
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            is_value = character == "["
        elif character in "}]":
            closers.pop()
        elif character == ",":
            is_value = closers[-1] == "]"
            end = index
        else:
            is_value = is_value or character == ":"
            continue
        best, closing = end, "".join(reversed(closers))
    return text[:best] + closing
