"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, end to end.

Owns the two handlers, and how an answer's events become Anthropic's. What a body says is for
`anthropic_body.py` and `anthropic_chat.py`, which make a chat of it; the order of a stream is
`anthropic_events.py`'s. Knows nothing of tokens, templates or the engine.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from saccade.core.errors import RequestError
from saccade.front.front import Event
from saccade.front.intake import Ask
from saccade.server.anthropic_body import (
    COUNT_TOKENS,
    MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from saccade.server.anthropic_chat import Places, as_chat
from saccade.server.anthropic_events import (
    Ending,
    MessageStream,
    MessageUsage,
    StreamEvent,
    WholeMessage,
)
from saccade.server.door import Door, Endpoint, send_json, while_connected
from saccade.server.gate import request_id
from saccade.server.openai import Reply, read_chat
from saccade.server.refusals import error_body
from saccade.server.stream import Told

_encode = msgspec.json.Encoder().encode


def message_routes(door: Door) -> list[Route]:
    messages = _Messages(door)
    return [
        Route("/v1/messages", Endpoint(messages.create), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(messages.count_tokens), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """What a body asks for. `asks` is one, and emptied when it is taken. `most`: tokens that the
    answer may have. `places`: of what may yet be refused.
    """

    asks: list[Ask]
    places: Places
    reply: Reply
    most: int = 0
    shows_thinking: bool = True


def read_message(body: bytearray, context_length: int) -> AskedMessage:
    """What is to be answered. Raises InvalidRequest that names the field in Anthropic's words."""
    request = MESSAGES.read(body, context_length)
    thinking = request.inquiry.thinking
    shows_thinking = thinking is None or thinking.display != "omitted"
    asked = _read_chat(request, context_length)
    return replace(asked, most=request.drawing.max_tokens, shows_thinking=shows_thinking)


def read_count(body: bytearray, context_length: int) -> AskedMessage:
    """What is to be counted. Raises as `read_message`."""
    return _read_chat(COUNT_TOKENS.read(body, context_length), context_length)


def _read_chat(request: MessagesRequest | CountTokensRequest, context_length: int) -> AskedMessage:
    chat = as_chat(request, context_length)
    body, places = chat.encoded(), chat.places
    del chat  # it holds the images' text, of which there is enough
    with places.kept():
        ask, reply, _ = read_chat(body, context_length)
    return AskedMessage([ask], places, reply)


@dataclass(frozen=True, slots=True)
class _Messages:
    """The handlers."""

    door: Door

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.door.admit(scope, receive) as (body, held):
            asked = await self.door.read(read_message, body)
            model = self.door.name_of(asked.reply.model)
            with asked.places.kept():
                answer = self.door.answer(
                    send,
                    asked.reply,
                    lambda told: MessageTeller(model, asked, told),
                    asked.asks,
                    held,
                )
                await while_connected(receive, answer)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of a prompt as it would be computed: images are fetched and their headers read, nothing
        is decoded, and the engine hears nothing.
        """
        front = self.door.front
        async with self.door.admit(scope, receive) as (body, held):
            asked = await self.door.read(read_count, body)
            self.door.name_of(asked.reply.model)
            length = front.ready.context_length
            with asked.places.kept():
                reading = front.intake.read(asked.asks.pop(), length, held.client, held)
                prompt = await while_connected(receive, reading)
            await send_json(send, {"input_tokens": len(prompt.tokens)})


class MessageTeller:
    """Tells an answer as Anthropic's message (see `stream.Teller`). One that may have no tokens is
    computed with one, which is not told.
    """

    def __init__(self, model: str, asked: AskedMessage, told: Told) -> None:
        self._tally = told.tally
        self._room = told.prepared[0].request.sampling.max_tokens
        self._most = asked.most
        self._stream = MessageStream(f"msg_{secrets.token_hex(12)}", model, asked.shows_thinking)
        self._begun = False
        self._message = WholeMessage()

    def shown(self, event: Event) -> bytes:
        return b"".join(_sse(each) for each in self._told(event))

    def ending(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return _sse(error_body(error, request_id.get()))

    def keep(self, event: Event) -> None:
        for each in self._told(event):
            self._message.add(each)

    def whole(self) -> dict[str, Any]:
        return self._message.told()

    def _told(self, event: Event) -> list[StreamEvent]:
        events = [] if self._begun else self._stream.begin(self._usage)
        self._begun = True
        if self._most:
            events += self._stream.feed(event.parts)
        if event.finish is not None:
            finish: Ending = event.finish
            if not self._most:
                finish = "length"
            elif finish == "length" and self._room < self._most:
                finish = "context"
            events += self._stream.end(finish, event.stop, self._usage)
        return events

    @property
    def _usage(self) -> MessageUsage:
        usage = self._tally.usage
        read, written = usage.prompt_tokens_details.cached_tokens, 0
        fresh = usage.prompt_tokens - read - written
        return MessageUsage(fresh, written, read, usage.completion_tokens if self._most else 0)


def _sse(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
