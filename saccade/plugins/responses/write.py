"""Writes an answer in the format of POST /v1/responses: stream events in order, and the response.

A response consists of output items. At most one of them is open at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Raw

from saccade.core.errors import ImageError, Overloaded, RequestError
from saccade.plugins.responses.items import new_id
from saccade.text.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Reasoned,
    Text,
)

ResponseEvent = dict[str, Any]
"""The data of one event. The event's name is its "type"."""
Ended = Literal["stop", "length", "cancelled", "prewarmed"]
"""How the answer ended. prewarmed: the request was only sent to cache its prompt."""


class ResponseStream:
    """Writes the stream of one answer.

    Call `opening_events`, then `feed` with new text, then `closing_events` or `fail`. `response` is
    the response's body, which is kept up to date. Its status is "in_progress" at first.

    single: whether a call to the computer has a single action.
    """

    def __init__(self, response: dict[str, Any], single: bool = False) -> None:
        self.response = response
        self._single = single
        self._number = 0
        self._item: dict[str, Any] | None = None  # the open item
        self._pieces: list[str] = []  # its text so far, which it gets when it is closed
        self._logprobs: list[Raw] = []  # those of tokens whose text has not arrived yet

    @property
    def _output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return output

    @property
    def reasons(self) -> bool:
        """Whether the latest content was reasoning."""
        return self._item is not None and self._item["type"] == "reasoning"

    def opening_events(self) -> list[ResponseEvent]:
        """Return the events before the first token."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def feed(
        self, parts: Iterable[AnswerEvent], logprobs: Sequence[Raw] = ()
    ) -> list[ResponseEvent]:
        """Return the events for new content. Log-probabilities are sent with their tokens' text."""
        self._logprobs += logprobs
        events = [sent for part in parts for sent in self._feed(part)]
        if self._item is not None and self._item["type"] != "message":
            self._logprobs = []  # only the text of messages has them
        return events

    def closing_events(self, how: Ended, usage: dict[str, Any], **more: Any) -> list[ResponseEvent]:
        """Return the events after the last token.

        how: why the answer ended.
        more: response fields to set at the end.
        """
        whole = how in ("stop", "prewarmed")
        silent = self._output or how == "prewarmed"
        events = [] if silent else self._feed(Text(""))  # the output is empty
        events += self._close("completed" if whole else "incomplete")
        response = self.response
        response |= {"usage": usage, **more}
        if whole:
            response |= {"status": "completed", "completed_at": int(time.time())}
            return [*events, self._whole("response.completed")]
        if how == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["status"] = "cancelled"
        return [*events, self._whole("response.incomplete")]

    def fail(self, error: RequestError) -> list[ResponseEvent]:
        """Return the events that report `error` to the client."""
        events = self._close("incomplete")
        code = "server_error"
        if isinstance(error, ImageError):
            code = "invalid_image"
        elif isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        failure = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        self.response |= {"status": "failed", "error": failure}
        return [*events, self._whole("response.failed")]

    # ---- items

    def _feed(self, part: AnswerEvent) -> list[ResponseEvent]:
        match part:
            case Text(text):
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                opened = self._enter("message", content)
                logprobs, self._logprobs = self._logprobs, []
                self._pieces.append(text)
                self._content["logprobs"] += logprobs
                if not (text or logprobs):
                    return opened
                name = "response.output_text.delta"
                return [*opened, self._within(name, delta=text, logprobs=logprobs)]
            case Reasoned(text):
                opened = self._enter("reasoning", {"type": "reasoning_text", "text": ""})
                self._pieces.append(text)
                return [*opened, self._within("response.reasoning_text.delta", delta=text)]
            case CallStarted(_, call_id, _, toolset) if toolset:
                return self._begin_action(call_id)
            case CallStarted(_, call_id, name):
                call = {"call_id": call_id, "name": name, "arguments": ""}
                return [*self._close(), self._open("function_call", call)]
            case CallArguments(_, text):
                self._pieces.append(text)
                if self._acting:
                    return []
                name = "response.function_call_arguments.delta"
                return [self._within(name, content=False, delta=text)]
            case CallEnded():
                return self._end_action() if self._acting else self._close()
            case CallBroken():
                return self._close("incomplete")

    # ---- actions

    @property
    def _acting(self) -> bool:
        return self._item is not None and self._item["type"] == "computer_call"

    def _begin_action(self, call_id: str) -> list[ResponseEvent]:
        """Start an action: the next one of the open call, or the first one of a new call. Returns
        the events.
        """
        if self._acting and not self._single:
            return []
        call: dict[str, Any] = {"call_id": call_id, "pending_safety_checks": []}
        acts: dict[str, Any] = {} if self._single else {"actions": []}
        return [*self._close(), self._open("computer_call", {**call, **acts})]

    def _end_action(self) -> list[ResponseEvent]:
        """Add a complete action to the open call, to which more may be added. Returns the
        events.
        """
        assert self._item is not None
        action, self._pieces = json.loads("".join(self._pieces)), []
        if self._single:
            self._item["action"] = action
            return self._close()
        self._item["actions"].append(action)
        return []

    @property
    def _content(self) -> dict[str, Any]:
        assert self._item is not None
        content: dict[str, Any] = self._item["content"][0]
        return content

    def _enter(self, kind: str, content: dict[str, Any]) -> list[ResponseEvent]:
        """Close the open item and open a new one with this content, unless an item of the same type
        is open.

        Returns the events.
        """
        if self._item is not None and self._item["type"] == kind:
            return []
        fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = [*self._close(), self._open(kind, {**fields, "content": []})]
        events.append(self._within("response.content_part.added", part=dict(content)))
        assert self._item is not None
        self._item["content"].append(content)
        return events

    def _open(self, kind: str, fields: dict[str, Any]) -> ResponseEvent:
        item = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        self._item = item
        empty: dict[str, Any] = {name: [] for name in ("content", "actions") if name in item}
        copied = {**item, **empty}
        return self._event("response.output_item.added", output_index=self._index, item=copied)

    def _close(self, status: str = "completed") -> list[ResponseEvent]:
        item = self._item
        if item is None:
            return []
        events, text = [], "".join(self._pieces)
        self._pieces = []
        if item["type"] == "function_call":
            item["arguments"] = text
            fields = {"arguments": item["arguments"], "name": item["name"]}
            name = "response.function_call_arguments.done"
            events.append(self._within(name, content=False, **fields))
        elif item["type"] != "computer_call":
            content = self._content
            content["text"] = text
            if item["type"] == "message":
                content["logprobs"] += self._logprobs
                fields = {"text": text, "logprobs": content["logprobs"]}
                events.append(self._within("response.output_text.done", **fields))
            else:
                name = "response.reasoning_text.done"
                events.append(self._within(name, text=text))
            events.append(self._within("response.content_part.done", part=content))
        self._logprobs = []
        item["status"] = status
        done = self._event("response.output_item.done", output_index=self._index, item=item)
        self._item = None
        return [*events, done]

    # ---- events

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _event(self, name: str, /, **fields: Any) -> ResponseEvent:
        number, self._number = self._number, self._number + 1
        return {"type": name, "sequence_number": number, **fields}

    def _within(self, name: str, /, content: bool = True, **fields: Any) -> ResponseEvent:
        assert self._item is not None
        at: dict[str, Any] = {"item_id": self._item["id"], "output_index": self._index}
        if content:
            at["content_index"] = 0
        return self._event(name, **at, **fields)

    def _whole(self, name: str) -> ResponseEvent:
        return self._event(name, response={**self.response, "output": list(self._output)})
