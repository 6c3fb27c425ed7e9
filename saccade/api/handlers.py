"""Handles requests of all APIs: prepares a request, then streams the answer or sends it as a whole.

This module also has the model's names, and calls the request logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade.api.chat.fields import Reply
from saccade.api.chat.write import UsageCounter
from saccade.api.stream import AnswerContext, ResponseWriter, StreamedBody, stream
from saccade.api.trace.timeline import journey
from saccade.core.errors import InternalError, InvalidRequest, NotFound, RequestError
from saccade.core.types import NO_ADAPTER, AdapterRef
from saccade.edge.body import Admission, BodyWatcher, BufferedBody, announced, read_json
from saccade.edge.headers import request_id
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.request_manager import RequestManager

if TYPE_CHECKING:
    from saccade.api.trace.tracer import Tracer
    from saccade.front.adapters import Adapter

log = logging.getLogger("saccade")

SMALL_BODY = 1 << 16
"""Maximum size in bytes of a body that is parsed on the event loop, in a few ms. Larger bodies are
parsed in a thread.
"""

T = TypeVar("T")


AnswerLog = Callable[[Sequence[PreparedRequest], UsageCounter, "Tracer"], None]
"""A function that is called after a request has been answered (`plugin.Http.answer_log`)."""

WatchBody = Callable[[BufferedBody], BodyWatcher | None]
"""Called before a large body is read (`plugin.Http.body_watcher`). Returns a watcher for it, or
None.
"""


@dataclass(frozen=True, slots=True)
class RequestHandler:
    """Prepares and answers requests.

    names: the model's names in the API. The first is used in responses by default.
    """

    front: RequestManager
    names: tuple[str, ...]
    admission: Admission
    logs: tuple[AnswerLog, ...] = ()
    watch: WatchBody | None = None

    async def receive_chat(self, request: Request, held: BufferedBody, largest: int) -> bytearray:
        """Return the body of a chat, read with `read_json`. If Content-Length announces a large
        body, a `BodyWatcher` inspects the body while it arrives.
        """
        if self.watch is not None and announced(request) > SMALL_BODY:
            held.watcher = self.watch(held)
        return await read_json(request, held, largest)

    async def read_body(self, read: Callable[[bytearray, int], T], body: bytearray) -> T:
        """Parse a body with `read` and return the result. Empty the body to free its memory,
        because the caller still references it.
        """
        context_length = self.front.check_ready().context_length
        if len(body) <= SMALL_BODY:
            found = read(body, context_length)
        else:
            found = await self.front.intake.in_thread(partial(read, body, context_length))
        with suppress(BufferError):  # something still references it
            body.clear()
        return found

    async def answer(
        self,
        send: Send,
        reply: Reply,
        tell: Callable[[AnswerContext], ResponseWriter],
        requests: list[GenerationRequest],
        held: BufferedBody,
    ) -> None:
        """Prepare the requests, and send the answers as a stream or as a whole.

        reply: the model's name, and whether to stream.
        tell: creates the writer of the response.
        """
        model, adapter = self.model_of(reply.model)
        way = journey.get()
        if way is not None:
            way.model, way.streamed = model, bool(reply.stream)
        if adapter != NO_ADAPTER:
            requests[:] = [replace(request, adapter=adapter) for request in requests]
        prepared = [await self.front.prepare(request, held.client, held) for request in requests]
        requests.clear()  # drops the images' base64 text
        kept = image_bytes(prepared)
        if any(each.request.prompt_logprobs is not None for each in prepared):
            from saccade.api.prompt_logprobs import score_bytes

            kept += score_bytes(prepared)
        held.resize(kept)
        tally = UsageCounter.of(prepared)
        traced = reply.trace or self.logs or way is not None
        tracer = None
        if traced:
            send, tracer = self._trace(send, prepared, reply.trace, held.receive_ms)
        context = AnswerContext(prepared, tally, tracer)
        try:
            await self._send(send, bool(reply.stream), context, tell(context))
        finally:
            if way is not None and tracer is not None:
                from saccade.api.trace.tracer import AnswerSummary

                way.answer = AnswerSummary.of(prepared, tally, tracer)
        if tracer is not None:
            for log in self.logs:
                log(prepared, tally, tracer)

    def _trace(
        self, send: Send, prepared: Sequence[PreparedRequest], wanted: bool, receive_ms: float
    ) -> tuple[Send, Tracer]:
        """Return the `send` to use, and a tracer of the request.

        If the client requested the trace, `send` also adds a header that reports how the images
        changed.
        """
        from saccade.api.trace.changes import ImageChanges, telling
        from saccade.api.trace.tracer import Tracer

        if not wanted:
            return send, Tracer(prepared, wanted, receive_ms=receive_ms)
        changes = ImageChanges(prepared[0], self.front.intake.media.prints)
        return telling(send, changes), Tracer(prepared, wanted, changes, receive_ms)

    async def _send(
        self, send: Send, streamed: bool, context: AnswerContext, teller: ResponseWriter
    ) -> None:
        async with aclosing(self.front.generate(*context.prepared, streamed=streamed)) as events:
            if streamed:
                await stream(send, context.counted(events), teller)
                return
            async for event in context.counted(events):
                teller.keep_update(event)
        content = teller.whole()
        if isinstance(content, StreamedBody):
            await self.send_scroll(send, content)
        else:
            await send_json(send, content)

    async def send_scroll(self, send: Send, content: StreamedBody) -> None:
        """Send a long response body in chunks, each of which is encoded in a thread."""
        pieces = content.pieces()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while piece := await self.front.intake.in_thread(partial(next, pieces, b"")):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def load_adapter(self, name: str, folder: str) -> Adapter:
        """Load a LoRA adapter, and return once requests may use it.

        Raises InvalidRequest if `name` is a name of the base model, or if the adapter cannot be
        loaded.
        """
        if name in self.names:
            raise InvalidRequest(f"lora_name: {name!r} is the name of the base model", "lora_name")
        return await self.front.adapters.load(name, folder)

    def model_of(self, name: str | None) -> tuple[str, AdapterRef]:
        """Return the model's name for responses, and the adapter to use, for the `model` of a
        request.

        Raises NotFound if no model or adapter has this name.
        """
        if not name or name in self.names:
            return name or self.names[0], NO_ADAPTER
        adapter = self.front.adapters.find(name)
        return (self.name_of(name), NO_ADAPTER) if adapter is None else (name, adapter.ref)

    def name_of(self, name: str | None) -> str:
        """Return the base model's name for responses. name: the `model` of a request. If it is None
        or empty, return the server's first name.

        Raises NotFound for names that the base model does not have, including names of adapters.
        """
        if name and name not in self.names:
            raise NotFound(
                f"the model {name[:200]!r} does not exist; this server has "
                f"{', '.join(map(repr, [*self.names, *self.front.adapters.names]))}",
                "model",
                "model_not_found",
            )
        return name or self.names[0]


def image_bytes(prepared: Sequence[PreparedRequest]) -> int:
    """Return the total size of all encoded images, in bytes. An image in several prompts counts
    once.
    """
    frames = [frame for each in prepared for opened in each.opened for frame in opened.frames]
    return sum([len(each.data) for each in {frame.encoded for frame in frames}])


class Endpoint:
    """An ASGI application that calls a handler with the ASGI arguments.

    Starlette would wrap a plain function, and pass it a `Request` instead.
    """

    def __init__(self, handle: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handle(scope, receive, send)
        except ClientDisconnect:
            log.debug("client disconnected before the response")
        except RequestError:
            raise
        except Exception as bug:
            log.exception("%s: a request failed", request_id.get())
            raise InternalError from bug


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def send_json(send: Send, content: object) -> None:
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
