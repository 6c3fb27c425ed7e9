"""The HTTP API: routes, keys, limits, and errors in OpenAI's shape.

Owns nothing of a request but its bytes on the wire: `openai.py` reads them, `front.py` answers,
`responses.py` and `stream.py` write. Knows nothing of tokens, templates or the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade import __version__
from saccade.core.config import MIB
from saccade.core.errors import (
    InternalError,
    NotFound,
    Overloaded,
    RequestError,
    Unauthorized,
)
from saccade.core.options import ServerOptions
from saccade.front.front import Front
from saccade.front.intake import Ask, Prepared
from saccade.server import metrics
from saccade.server.body import Bodies, Held, read_json
from saccade.server.files import file_routes
from saccade.server.gate import RequestIds, request_id
from saccade.server.openai import (
    Reply,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from saccade.server.openapi import describe
from saccade.server.responses import (
    ChatShape,
    ChoiceReply,
    ErrorBody,
    ErrorResponse,
    Model,
    ModelList,
    Shape,
    Tally,
    TextShape,
    TokenCount,
    TokenText,
    Writer,
)
from saccade.server.stream import UsageWanted, stream
from saccade.server.tenant import CLIENT, Keys, client_of
from saccade.server.trace import ImageCost, Tracer

log = logging.getLogger("saccade")

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""What answers without the API key, and on connections beyond the limit."""

SMALL_BODY = 1 << 16
"""Bytes of a body that is read on the event loop (at most some ms); more goes to a thread."""

T = TypeVar("T")


def build_app(
    front: Front, names: Sequence[str], options: ServerOptions, body_seconds: float
) -> Starlette:
    """The ASGI application.

    `names`: what the API calls the model, the first being its own name for it. `body_seconds`: how
    long a request's body may take to come.
    """
    assert names
    bodies = Bodies(options.inflight_bytes, front.metrics, body_seconds)
    api = _Api(front, tuple(names), options, int(time.time()), bodies)
    middleware = [Middleware(RequestIds)]
    if options.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    if keys := Keys.of(options):
        open_paths = OPEN_PATHS | ({"/metrics"} if options.metrics_without_key else set())
        middleware.append(Middleware(_KeyCheck, keys=keys, open_paths=open_paths))
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _Endpoint(api.chat), methods=["POST"]),
            Route("/v1/completions", _Endpoint(api.complete), methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/tokenize", _Endpoint(api.tokenize), methods=["POST"]),
            Route("/detokenize", _Endpoint(api.detokenize), methods=["POST"]),
            Route("/flush_cache", api.flush_cache, methods=["POST"]),
            Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
            Route("/openapi.json", api.openapi),
            *file_routes(front.intake.media, bodies, options.max_body_mb * MIB),
            Route("/health", api.health),
            Route("/ping", api.health),
            Route("/metrics", api.metrics),
            Route("/version", api.version),
        ],
        middleware=middleware,
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_leaver,
            Exception: _on_bug,
        },
    )


@dataclass(frozen=True, slots=True)
class _Api:
    """The handlers.

    `started`: seconds since the epoch, which the model list calls the model's creation.
    """

    front: Front
    names: tuple[str, ...]
    options: ServerOptions
    started: int
    bodies: Bodies

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._admit(scope, receive) as (body, held):
            ask, reply, answer = await self._read(read_chat, body)
            shape = ChatShape(self.front.vocabulary, bool(answer.logprobs))
            await _while_connected(receive, self._answer(send, reply, shape, [ask], held))

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._admit(scope, receive) as (body, held):
            asks, reply, prompt = await self._read(read_completion, body)
            shape = TextShape(self.front.vocabulary, prompt.logprobs is not None)
            await _while_connected(receive, self._answer(send, reply, shape, asks, held))

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._admit(scope, receive) as (body, held):
            ask, reply, counting = await self._read(read_tokenize, body)
            self._name(reply.model)
            context_length = self.front.check_ready().context_length
            prompt = await _while_connected(
                receive, self.front.intake.read(ask, context_length, held.client, held)
            )
            images = [
                ImageCost.of(picture, place)
                for picture, place in zip(prompt.pictures, prompt.places, strict=True)
            ]
            strings = self.front.intake.tokenizer.strings(prompt.tokens)
            count = TokenCount(
                len(prompt.tokens),
                context_length,
                prompt.tokens,
                images,
                strings if counting.return_token_strs else UNSET,
            )
            await _send_json(send, count)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._admit(scope, receive) as (body, _):
            tokens = await self._read(read_detokenize, body)
            self._name(tokens.model)
            text = self.front.intake.tokenizer.decode(tokens.tokens)
            await _send_json(send, TokenText(text))

    async def _read(self, read: Callable[[bytearray, int], T], body: bytearray) -> T:
        """What a body says; it is emptied, for whoever read it still holds it."""
        context_length = self.front.check_ready().context_length
        if len(body) <= SMALL_BODY:
            found = read(body, context_length)
        else:
            found = await self.front.intake.in_thread(partial(read, body, context_length))
        with suppress(BufferError):  # something refers to it still: it goes with that
            body.clear()
        return found

    @asynccontextmanager
    async def _admit(self, scope: Scope, receive: Receive) -> AsyncIterator[tuple[bytearray, Held]]:
        """The body, then a permit: who sends slowly keeps none from others. A full server refuses
        before the body. What the request holds of memory counts until it has ended.
        """
        request = Request(scope, receive)
        largest = self.options.max_body_mb * MIB
        client = client_of(scope)
        with self.front.admit(client):
            pass  # there is a permit now
        with self.bodies.hold(request, largest) as held:
            body = await read_json(request, held, largest)
            with self.front.admit(client):
                yield body, held

    async def _answer(
        self, send: Send, reply: Reply, shape: Shape, asks: list[Ask], held: Held
    ) -> None:
        model = self._name(reply.model)
        prepared = [await self.front.prepare(ask, held.client, held) for ask in asks]
        asks.clear()  # from here on the request holds no text of its pictures
        encoded = {picture.encoded for each in prepared for picture in each.pictures}
        held.resize(sum(len(each.data) for each in encoded))
        tally = Tally(sum(len(each.request.tokens) for each in prepared), prepared[0].n)
        tracer = Tracer(prepared, reply.trace)
        writer = Writer(shape, model)
        async with aclosing(self.front.generate(*prepared)) as events:
            if reply.stream:
                usage: UsageWanted = (
                    "always" if reply.continuous_usage else "last" if reply.include_usage else None
                )
                await stream(send, events, writer, tally, tracer, usage)
            else:
                answers = [ChoiceReply(shape, i) for i in range(sum(each.n for each in prepared))]
                async for event in events:
                    answers[event.choice].add(event)
                    tally.add(event)
                    tracer.add(event)
                await _send_json(
                    send,
                    writer.whole(answers, tally.usage, tracer.trace if tracer.wanted else UNSET),
                )
        self._log(prepared, tally, tracer)

    def _log(self, prepared: Sequence[Prepared], tally: Tally, tracer: Tracer) -> None:
        request, usage = prepared[0].request, tally.usage
        if self.options.log_requests:
            log.info(
                "%s: %s: %d prompt tokens (%d cached), %d pictures, %d tokens, %.3f s",
                request_id.get(),
                request.id,
                usage.prompt_tokens,
                usage.prompt_tokens_details.cached_tokens,
                len(request.images),
                usage.completion_tokens,
                tracer.seconds,
            )
        slow = self.options.log_slow_seconds
        if slow is not None and tracer.seconds > slow:
            log.warning(
                "%s: %s was slow: %s",
                request_id.get(),
                request.id,
                msgspec.json.encode(tracer.trace).decode(),
            )

    def _name(self, name: str | None) -> str:
        """What the client calls the model; the server's own name where it says nothing."""
        if name is not None and name not in self.names:
            raise NotFound(
                f"the model {name[:200]!r} does not exist; this server has "
                f"{', '.join(map(repr, self.names))}",
                "model",
                "model_not_found",
            )
        return name or self.names[0]

    def _model(self, name: str) -> Model:
        if self.front.state != "ready":
            return Model(name, self.started)
        return Model(name, self.started, self.front.check_ready().context_length)

    async def models(self, _: Request) -> Response:
        return _json(ModelList([self._model(name) for name in self.names]))

    async def model(self, request: Request) -> Response:
        return _json(self._model(self._name(request.path_params["name"])))

    async def health(self, _: Request) -> Response:
        status, reason = self.front.health
        state = {"status": status, "model": self.names[0]}
        return _json(state) if status == "ready" else _json({**state, "reason": reason}, 503)

    async def flush_cache(self, request: Request) -> Response:
        _check_operator(request)
        self.front.flush(embeddings=True)
        return Response()

    async def reset_prefix_cache(self, request: Request) -> Response:
        _check_operator(request)
        self.front.flush(embeddings=False)
        return Response()

    async def metrics(self, _: Request) -> Response:
        text = metrics.render(await self.front.scrape())
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        return _json(describe())

    async def version(self, _: Request) -> Response:
        return _json({"version": __version__})


class _Endpoint:
    """A bare ASGI application, so that a handler may own the whole exchange (Starlette wraps plain
    functions).
    """

    def __init__(self, handle: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handle(scope, receive, send)
        except ClientDisconnect:
            log.debug("a client has gone before its answer")
        except RequestError:
            raise
        except Exception as bug:
            log.exception("%s: a request failed", request_id.get())
            raise InternalError from bug


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises ClientDisconnect then.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        # The request's resources are free only once its work has really ended.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _KeyCheck:
    """Lets through what carries a key, and what is open."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Set[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._keys.client(scope)
        if client is None and scope["path"] not in self._open_paths:
            await _error_response(
                Unauthorized(
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                )
            )(scope, receive, send)
            return
        if client is not None:
            scope[CLIENT] = client
        await self._app(scope, receive, send)


# ---- responses


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _send_json(send: Send, content: object) -> None:
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error_response(error: RequestError) -> Response:
    response = _json(ErrorResponse.of(error), error.status)
    if isinstance(error, Overloaded):
        response.headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    what = {
        404: f"there is no {request.url.path[:200]}",
        405: f"{request.method} is not allowed on {request.url.path[:200]}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = ErrorBody(what.get(error.status_code, error.detail), "invalid_request_error", None, code)
    response = _json(ErrorResponse(body), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_leaver(_: Request, __: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=400)


async def _on_bug(_: Request, __: Exception) -> Response:
    return _error_response(InternalError())


def _check_operator(request: Request) -> None:
    """Caches are everybody's. Raises Unauthorized for one of several named keys."""
    client = client_of(request.scope)
    if client.limited and client.name:
        raise Unauthorized("caches are every key's: only the key of --api-key may flush them")
