"""The HTTP API: routes, API keys, limits, and errors in OpenAI's format.

`chat/read.py` parses requests, `front/` answers them, and `chat/write.py` and `stream.py` write
responses.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade import __version__
from saccade.api.chat.fields import Reply
from saccade.api.chat.read import read_chat, read_completion, read_detokenize, read_tokenize
from saccade.api.chat.write import (
    ChatShape,
    Model,
    ModelList,
    Shape,
    TextShape,
    TokenCount,
    TokenText,
    Writer,
)
from saccade.api.handlers import Endpoint, RequestHandler, json_response, send_json
from saccade.api.mounting import ApiContext, Resumption, methods_of, mount
from saccade.api.stream import AnswerContext, Choices, UsageWanted
from saccade.api.trace.image_trace import ImageCost
from saccade.api.trace.timeline import note_failure
from saccade.core.config import MIB
from saccade.core.errors import InternalError, RequestError, Unauthorized
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.settings import KeySettings
from saccade.edge import metrics_text as metrics
from saccade.edge.body import READ, Admission, Bodies, while_connected
from saccade.edge.headers import (
    CLIENT,
    INSTANCE_HEADER,
    Guard,
    RequestIds,
    check_operator,
    is_loopback,
    request_id,
)
from saccade.edge.refusal import ErrorBody, body_for, refusal
from saccade.front.request_manager import RequestManager
from saccade.plugin import Plugin

if TYPE_CHECKING:
    from saccade.api.prompt_logprobs import PromptTeller
    from saccade.api.trace.request_trace import TimelineRecorder
    from saccade.edge.auth import Keys

log = logging.getLogger("saccade")

READY_PATHS = ("/health", "/healthz", "/ping", "/readyz")
OPEN_PATHS = frozenset({*READY_PATHS, "/livez", "/version"})
"""Paths that require no API key, and that connections over the connection limit can request."""


REASON = "saccade.reason"
"""Key in an ASGI scope under which the error code of a failed request is stored."""

_OPEN_METRICS = "; a server started with --metrics-without-key needs none here"


def build_app(
    front: RequestManager,
    names: Sequence[str],
    options: ServeOptions,
    plugins: tuple[Plugin, ...],
    recorders: Sequence[TimelineRecorder] = (),
) -> Starlette:
    """Build the ASGI application.

    names: the model's names in the API. The first is used in responses by default.
    recorders: receive the timelines of requests with a valid key.

    With --role encode, the only routes are those that other servers need.
    """
    assert names
    server = options.server
    bodies = Bodies(server.inflight_bytes, front.metrics, options.edge.body_timeout)
    admission = Admission(front.permits, bodies, server.max_body_mb * MIB, front.check_ready)
    added = [plugin.http for plugin in plugins]
    logs = tuple(resolve_name(each.answer_log)(options) for each in added if each.answer_log)
    watcher = next((each.body_watcher for each in added if each.body_watcher), None)
    watch = None if watcher is None else resolve_name(watcher)(front)
    handler = RequestHandler(front, tuple(names), admission, logs, watch)
    inner = Starlette(exception_handlers=_HANDLERS)
    context = ApiContext(handler, options, plugins, secrets.token_hex(4), int(time.time()), inner)
    mounted = mount(plugins, context)
    context.services.add(Resumption(mounted))
    api = _Api(front, handler, context.instance, context.started)
    routes = [route for plugin in mounted for route in plugin.routes]
    routes += _own_routes(api) if options.role == "encode" else _public_routes(api)
    inner.router.routes.extend(routes)
    keyless = OPEN_PATHS.union(*(plugin.plugin.http.keyless for plugin in mounted))
    app = Starlette(
        routes=routes,
        middleware=_middleware(options, recorders, keyless, front.metrics),
        exception_handlers=_HANDLERS,
    )
    app.router.redirect_slashes = False  # the connection removes a trailing slash
    front.metrics.set("saccade_build_info", 1, version=__version__, model=names[0])
    app.state.plugins, app.state.services = mounted, context.services
    return app


def _middleware(
    options: ServeOptions,
    recorders: Sequence[TimelineRecorder],
    keyless: Set[str],
    metrics: Metrics,
) -> list[Middleware]:
    middleware = [Middleware(_CountedResponses, metrics=metrics), Middleware(RequestIds)]
    server = options.server
    if not options.asks_for_key and is_loopback(server.host):
        own, origins = server.allowed_hosts, server.cors_origins
        middleware.append(Middleware(Guard, names=own, origins=origins))
    if server.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    if options.asks_for_key:
        from saccade.edge.auth import Keys

        keys = Keys(server.key, options.of(KeySettings))
        open_paths = keyless | ({"/metrics"} if server.metrics_without_key else set())
        middleware.append(Middleware(_KeyCheck, keys=keys, open_paths=open_paths))
    if recorders:
        from saccade.api.trace.request_trace import Journeys

        middleware.append(Middleware(Journeys, recorders=recorders))
    return middleware


def _public_routes(api: _Api) -> list[BaseRoute]:
    return [
        Route("/v1/chat/completions", Endpoint(api.chat), methods=["POST"]),
        Route("/v1/completions", Endpoint(api.complete), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", Endpoint(api.tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(api.detokenize), methods=["POST"]),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
        *_own_routes(api),
    ]


def _own_routes(api: _Api) -> list[BaseRoute]:
    return [
        Route("/flush_cache", api.flush_cache, methods=["POST"]),
        *(Route(path, api.health) for path in READY_PATHS),
        Route("/livez", api.liveness),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
    ]


@dataclass(frozen=True, slots=True)
class _Api:
    front: RequestManager
    handler: RequestHandler
    instance: str  # identifies this server process, so that a router finds stored responses
    started: int  # seconds since the epoch, reported as the model's creation time

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = self.handler.admission.admit(scope, receive, self.handler.receive_chat)
        async with reading as (body, held):
            request, reply, answer = await self.handler.read_body(read_chat, body)
            shape = ChatShape(
                self.front.vocabulary,
                bool(answer.logprobs),
                request.chat.tools is not None and request.chat.tools.open,
                answer.include_reasoning is not False,
            )
            tell = self._choices(shape, reply, answer.prompt_logprobs)
            await while_connected(receive, self.handler.answer(send, reply, tell, [request], held))

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            requests, reply, prompt = await self.handler.read_body(read_completion, body)
            shape = TextShape(self.front.vocabulary, prompt.logprobs is not None)
            texts: Sequence[str] = ()
            if prompt.echo:
                from saccade.api.prompt_logprobs import texts_of

                read = partial(texts_of, requests, self.front.intake)
                texts = await self.front.intake.in_thread(read)
            echoed = prompt.logprobs if prompt.echo else None
            tell = self._choices(shape, reply, prompt.prompt_logprobs, texts, echoed)
            await while_connected(receive, self.handler.answer(send, reply, tell, requests, held))

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, held):
            request, reply, counting = await self.handler.read_body(read_tokenize, body)
            self.handler.model_of(reply.model)
            context_length = self.front.check_ready().context_length
            prompt = await while_connected(
                receive, self.front.intake.read_prompt(request, context_length, held.client, held)
            )
            images = [
                ImageCost.of(opened, place)
                for opened, place in zip(prompt.opened, prompt.places, strict=True)
            ]
            count = TokenCount(len(prompt.tokens), context_length, prompt.tokens, images)
            from saccade.api.prompt_logprobs import scroll_count

            name = self.front.intake.tokenizer.string if counting.return_token_strs else None
            await self.handler.send_scroll(send, scroll_count(count, name))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.handler.admission.admit(scope, receive) as (body, _):
            tokens = await self.handler.read_body(read_detokenize, body)
            self.handler.model_of(tokens.model)
            self.front.intake.limits.check_tokens("tokens", tokens.tokens)
            text = self.front.intake.tokenizer.decode(tokens.tokens)
            await send_json(send, TokenText(text))

    def _choices(
        self,
        shape: Shape,
        reply: Reply,
        top: int | None,
        texts: Sequence[str] = (),
        echoed: int | None = None,
    ) -> Callable[[AnswerContext], Choices | PromptTeller]:
        """Return a function that creates the writer of a response in OpenAI's format.

        top, texts, echoed: become the fields of a `PromptView`.
        """
        usage: UsageWanted = (
            "always" if reply.continuous_usage else "last" if reply.include_usage else None
        )

        def tell(context: AnswerContext) -> Choices | PromptTeller:
            writer = Writer(shape, self.handler.model_of(reply.model)[0])
            choices = Choices(writer, context, usage)
            if top is None and not texts:
                return choices
            from saccade.api.prompt_logprobs import PromptTeller, PromptView

            view = PromptView(texts, echoed, top)
            return PromptTeller(choices, view, context.prepared, self.front.vocabulary)

        return tell

    def _model(self, name: str) -> Model:
        made = Model(name, self.started)
        if self.front.state == "ready":
            made.max_model_len = self.front.check_ready().context_length
        if not self.front.proven:
            made.unproven = True
        if name not in self.handler.names:
            made.parent = self.handler.names[0]
        return made

    async def models(self, _: Request) -> Response:
        names = [*self.handler.names, *(each.name for each in self.front.adapters.loaded)]
        return json_response(ModelList([self._model(name) for name in names]))

    async def model(self, request: Request) -> Response:
        return json_response(self._model(self.handler.model_of(request.path_params["name"])[0]))

    async def health(self, _: Request) -> Response:
        status, reason = self.front.health
        state = {"status": status, "model": self.handler.names[0]}
        ready = status == "ready"
        body = state if ready else {**state, "reason": reason}
        response = json_response(body, 200 if ready else 503)
        response.headers[INSTANCE_HEADER] = self.instance
        return response

    async def liveness(self, _: Request) -> Response:
        """Return 503 if the server needs a restart, otherwise 200. A server that is still loading
        gets 200, too.
        """
        status, reason = self.front.health
        dead = status in ("failed", "stalled")
        return json_response({"status": status, "reason": reason}, 503 if dead else 200)

    async def flush_cache(self, request: Request) -> Response:
        check_operator(request.scope)
        self.front.flush(embeddings=True)
        return Response()

    async def reset_prefix_cache(self, request: Request) -> Response:
        check_operator(request.scope)
        self.front.flush(embeddings=False)
        return Response()

    async def metrics(self, _: Request) -> Response:
        text = metrics.render(await self.front.scrape())
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__, "accepts": READ})


class _CountedResponses:
    """Middleware that counts responses by status and error code, in the metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                code, reason = str(message["status"]), scope.get(REASON, "")
                self._metrics.inc("saccade_http_responses_total", code=code, reason=reason)
            await send(message)

        await self._app(scope, receive, send_counted)


class _KeyCheck:
    """Middleware that requires a valid API key, except for `open_paths`.

    An open path that ends with a slash includes all paths below it.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Set[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._keys.client(scope)
        if client is None and not self._is_open(scope["path"]):
            error = Unauthorized(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY', "
                "'x-api-key: KEY' or 'api-key: KEY'"
                + (_OPEN_METRICS if scope["path"] == "/metrics" else "")
            )
            await _error_response(scope, error)(scope, receive, send)
            return
        if client is not None:
            scope[CLIENT] = client
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        folder = path[: path.find("/", 1) + 1]
        return path in self._open_paths or (bool(folder) and folder in self._open_paths)


# ---- responses


def _error_response(scope: Scope, error: RequestError) -> Response:
    note_failure(error)
    scope[REASON] = error.code or error.type
    status, headers, body = refusal(scope["path"], error, request_id.get())
    return Response(body, status, headers, "application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error_response(request.scope, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status, headers = request.url.path, error.status_code, error.headers
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    code, what = None, error.detail
    if status in (404, 405):
        from saccade.api.elsewhere import advice, overview
    if status == 404:
        known = {route.path for route in routes}
        code, what = "not_found", f"there is no {path[:200]}{advice(path) or overview(known)}"
    elif status == 405:
        allowed = sorted(methods_of(routes, path))
        headers = {"allow": ", ".join(allowed)}
        use = " or ".join(method for method in allowed if method != "HEAD")
        what = f"{request.method} is not allowed on {path[:200]}{advice(path) or f': use {use}'}"
        code = "method_not_allowed"
    request.scope[REASON] = code or ""
    fault = ErrorBody(what, "invalid_request_error", None, code)
    status, body = body_for(path, status, fault, request_id.get())
    return Response(body, status, headers, "application/json")


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Return a placeholder response for a client that has disconnected and cannot receive it."""
    return Response(status_code=400)


async def _on_bug(request: Request, _: Exception) -> Response:
    return _error_response(request.scope, InternalError())


_HANDLERS = {
    RequestError: _on_request_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
    Exception: _on_bug,
}
