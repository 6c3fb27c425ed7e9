"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, end to end.

`fields.py` and `read.py` read bodies, and `write.py` writes answers and streams.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.api.handlers import Endpoint, RequestHandler, send_json
from saccade.api.mounting import ApiContext
from saccade.api.stream import AnswerContext
from saccade.core.errors import RequestError
from saccade.core.types import CacheMiss
from saccade.edge.body import while_connected
from saccade.edge.headers import request_id
from saccade.edge.refusal import error_body
from saccade.front.answer_update import AnswerUpdate
from saccade.front.extras import find_extra
from saccade.plugins.agents.history_edits import AppliedEdit
from saccade.plugins.messages.read import AskedMessage, read_count, read_message
from saccade.plugins.messages.write import (
    Ending,
    MessageStream,
    MessageUsage,
    StreamEvent,
    WholeMessage,
)

_encode = msgspec.json.Encoder().encode


def message_routes(api: ApiContext) -> list[Route]:
    messages = _Messages(api.handler)
    return [
        Route("/v1/messages", Endpoint(messages.create), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(messages.count_tokens), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Messages:
    """The handlers of /v1/messages and /v1/messages/count_tokens."""

    handler: RequestHandler

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = self.handler.admission.admit(scope, receive, self.handler.receive_chat)
        async with reading as (body, held):
            asked = await self.handler.read_body(read_message, body)
            model, _ = self.handler.model_of(asked.reply.model)
            requests = asked.requests
            answer = self.handler.answer(
                send,
                asked.reply,
                lambda context: MessageTeller(model, asked, context),
                requests,
                held,
            )
            await while_connected(receive, answer)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a prompt's tokens. Images are fetched and their headers are read, but they are not
        decoded. The engine is not used.
        """
        front = self.handler.front
        async with self.handler.admission.admit(scope, receive) as (body, held):
            asked = await self.handler.read_body(read_count, body)
            self.handler.model_of(asked.reply.model)
            length = front.check_ready().context_length
            reading = front.intake.read_prompt(asked.requests.pop(), length, held.client, held)
            prompt = await while_connected(receive, reading)
            counts: dict[str, Any] = {"input_tokens": len(prompt.tokens)}
            if asked.manages_context:
                edited = find_extra(prompt.extras, AppliedEdit)
                before = len(prompt.tokens) if edited is None else edited.tokens
                counts["context_management"] = {"original_input_tokens": before}
            await send_json(send, counts)


HOUR = 3600
"""Cache lifetimes of at least this many seconds are reported as 1 h, and shorter ones as 5 min."""


def diagnosis(missed: CacheMiss | None) -> dict[str, Any]:
    """Return the cache diagnostics in Anthropic's format. It has fewer reasons, so all reasons
    except a changed prompt become "unavailable".

    `saccade_reason` and `saccade_place` have the details.
    """
    if missed is None:
        return {"cache_miss_reason": None}
    place = missed.place
    changed = next((part for part in ("tools", "system") if place.startswith(part)), "messages")
    kind = "unavailable"
    if missed.reason in ("prompt_changed", "other_settings"):
        kind = f"{changed}_changed"
    elif missed.reason == "never_seen":
        kind = "previous_message_not_found"
    reason: dict[str, Any] = {"type": kind, "saccade_reason": missed.reason, "saccade_place": place}
    if kind.endswith("changed"):
        reason["cache_missed_input_tokens"] = missed.tokens
    return {"cache_miss_reason": reason}


def applied_edits(edited: AppliedEdit | None) -> dict[str, Any]:
    """Return the effect of a request's edits, in Anthropic's format."""
    if edited is None or not edited.cleared_uses:
        return {"applied_edits": []}
    cleared = {
        "type": "clear_tool_uses_20250919",
        "cleared_input_tokens": edited.cleared_tokens,
        "cleared_tool_uses": edited.cleared_uses,
    }
    return {"applied_edits": [cleared]}


class MessageTeller:
    """Writes an answer as Anthropic's message. Implements `stream.ResponseWriter`.

    If no answer is requested, one token is computed and discarded.
    """

    def __init__(self, model: str, asked: AskedMessage, context: AnswerContext) -> None:
        self._tally = context.tally
        self._diagnoses = context.prepared[0].request.caching.diagnose
        self._max_tokens = context.prepared[0].request.sampling.max_tokens
        self._most = asked.most
        self._stream = MessageStream(f"msg_{secrets.token_hex(12)}", model, asked.shows_thinking)
        edited = find_extra(context.prepared[0].extras, AppliedEdit)
        self._edited = applied_edits(edited) if asked.manages_context else None
        self._begun = False
        self._message = WholeMessage()

    def shown(self, event: AnswerUpdate) -> bytes:
        return b"".join(_sse(each) for each in self._events_of(event))

    def ending(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return _sse(error_body(error, request_id.get()))

    def keep_update(self, event: AnswerUpdate) -> None:
        for each in self._events_of(event):
            self._message.add_event(each)

    def whole(self) -> dict[str, Any]:
        return self._message.body()

    def _events_of(self, event: AnswerUpdate) -> list[StreamEvent]:
        events = [] if self._begun else self._stream.opening_events(self._usage, self._diagnosis)
        self._begun = True
        if self._most:
            events += self._stream.feed(event.parts)
        if event.finish is not None:
            finish: Ending = event.finish
            if not self._most:
                finish = "length"
            elif finish == "length" and self._max_tokens < self._most:
                finish = "context"
            events += self._stream.closing_events(finish, event.stop, self._usage, self._edited)
        return events

    @property
    def _diagnosis(self) -> dict[str, Any] | None:
        return diagnosis(self._tally.missed) if self._diagnoses else None

    @property
    def _usage(self) -> MessageUsage:
        usage = self._tally.usage
        prompt, kept = usage.prompt_tokens_details, self._tally.written
        written = kept.total()
        hour = sum(tokens for seconds, tokens in kept.items() if seconds >= HOUR)
        fresh = usage.prompt_tokens - prompt.cached_tokens - written
        output = usage.completion_tokens if self._most else 0
        return MessageUsage(fresh, written, prompt.cached_tokens, output, hour, prompt.beside)


def _sse(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
