"""The HTTP API: routes, keys, limits, and errors in OpenAI's shape.

Owns only a request's bytes on the wire: `chat/read.py` reads, `front/` answers, `chat/write.py`
and `stream.py` write. Knows nothing of tokens, templates or the engine.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade import __version__
from saccade.api.about.elsewhere import advice, overview
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
from saccade.api.prompt_logprobs import PromptTeller, PromptView, scroll_count, texts_of
from saccade.api.stream import AnswerContext, Choices, UsageWanted
from saccade.api.trace.image_trace import ImageCost
from saccade.api.trace.request_trace import Journeys, RequestTimeline, note_failure
from saccade.core.config import MIB
from saccade.core.errors import InternalError, RequestError, Unauthorized
from saccade.core.metrics import Metrics
from saccade.core.options import ObservabilityOptions, ServeOptions, ServerOptions
from saccade.edge import metrics_text as metrics
from saccade.edge.admission import Admission
from saccade.edge.auth import CLIENT, Keys, check_operator
from saccade.edge.body import READ, Bodies
from saccade.edge.disconnect import while_connected
from saccade.edge.guard import Guard, is_loopback
from saccade.edge.headers import INSTANCE_HEADER, RequestIds, request_id
from saccade.edge.refusal import ErrorBody, body_for, refusal
from saccade.front.request_manager import RequestManager
from saccade.plugins import plugins

log = logging.getLogger("saccade")

READY_PATHS = ("/health", "/healthz", "/ping", "/readyz")
OPEN_PATHS = frozenset({*READY_PATHS, "/livez", "/version"})
"""Paths that answer without the API key, and on connections beyond the limit."""


REASON = "saccade.reason"
"""Key of a scope: the code of the error that the request ends with."""

_OPEN_METRICS = "; a server started with --metrics-without-key asks for none here"


def build_app(
    front: RequestManager,
    names: Sequence[str],
    options: ServeOptions,
    record: Callable[[RequestTimeline], None] | None = None,
) -> Starlette:
    """Build the ASGI application.

    `names`: the model's names in the API, its own name first. `record`: gets the timelines of
    requests with a right key. With role encode, other servers are the only clients.
    """
    assert names
    server, watch = options.server, options.watch
    bodies = Bodies(server.inflight_bytes, front.metrics, options.edge.body_timeout)
    admission = Admission(front.permits, bodies, server.max_body_mb * MIB, front.check_ready)
    door = RequestHandler(front, tuple(names), admission, watch)
    inner = Starlette(exception_handlers=_HANDLERS)
    context = ApiContext(door, options, secrets.token_hex(4), int(time.time()), inner)
    mounted = mount(plugins(), context)
    context.services.add(Resumption(mounted))
    api = _Api(front, door, context.instance, context.started)
    routes = [route for plugin in mounted for route in plugin.routes]
    routes += _own_routes(api) if options.role.role == "encode" else _public_routes(api)
    inner.router.routes.extend(routes)
    keyless = OPEN_PATHS.union(*(plugin.plugin.keyless for plugin in mounted))
    app = Starlette(
        routes=routes,
        middleware=_middleware(server, watch, record, keyless, front.metrics),
        exception_handlers=_HANDLERS,
    )
    app.router.redirect_slashes = False  # the connection drops a slash at a path's end
    front.metrics.set("saccade_build_info", 1, version=__version__, model=names[0])
    app.state.plugins, app.state.services = mounted, context.services
    return app


def _middleware(
    options: ServerOptions,
    watch: ObservabilityOptions,
    record: Callable[[RequestTimeline], None] | None,
    keyless: Set[str],
    metrics: Metrics,
) -> list[Middleware]:
    """Return the layers around every request, from the outside in."""
    middleware = [Middleware(_CountedResponses, metrics=metrics), Middleware(RequestIds)]
    if not options.asks_for_key and is_loopback(options.host):
        own, origins = options.allowed_hosts, options.cors_origins
        middleware.append(Middleware(Guard, names=own, origins=origins))
    if options.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    if keys := Keys(options):
        open_paths = keyless | ({"/metrics"} if watch.metrics_without_key else set())
        middleware.append(Middleware(_KeyCheck, keys=keys, open_paths=open_paths))
    if record is not None:
        middleware.append(Middleware(Journeys, record=record))
    return middleware


def _public_routes(api: _Api) -> list[BaseRoute]:
    """Return the core's routes for clients of a language model."""
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
    """Return the routes about the server itself."""
    return [
        Route("/flush_cache", api.flush_cache, methods=["POST"]),
        *(Route(path, api.health) for path in READY_PATHS),
        Route("/livez", api.liveness),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
    ]


@dataclass(frozen=True, slots=True)
class _Api:
    """The handlers.

    `instance`: names this run of the server, so that a router finds kept responses. `started`:
    seconds since the epoch, shown in the model list as the model's creation.
    """

    front: RequestManager
    door: RequestHandler
    instance: str
    started: int

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.door.admission.admit(scope, receive) as (body, held):
            request, reply, answer = await self.door.read_body(read_chat, body)
            shape = ChatShape(
                self.front.vocabulary,
                bool(answer.logprobs),
                request.chat.tools is not None and request.chat.tools.open,
                answer.include_reasoning is not False,
            )
            tell = self._choices(shape, reply, PromptView(top=answer.prompt_logprobs))
            await while_connected(receive, self.door.answer(send, reply, tell, [request], held))

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.door.admission.admit(scope, receive) as (body, held):
            requests, reply, prompt = await self.door.read_body(read_completion, body)
            shape = TextShape(self.front.vocabulary, prompt.logprobs is not None)
            view = PromptView(top=prompt.prompt_logprobs)
            if prompt.echo:
                read = partial(texts_of, requests, self.front.intake)
                texts = await self.front.intake.in_thread(read)
                view = PromptView(texts, prompt.logprobs, prompt.prompt_logprobs)
            tell = self._choices(shape, reply, view)
            await while_connected(receive, self.door.answer(send, reply, tell, requests, held))

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.door.admission.admit(scope, receive) as (body, held):
            request, reply, counting = await self.door.read_body(read_tokenize, body)
            self.door.model_of(reply.model)
            context_length = self.front.check_ready().context_length
            prompt = await while_connected(
                receive, self.front.intake.read_prompt(request, context_length, held.client, held)
            )
            images = [
                ImageCost.of(opened, place)
                for opened, place in zip(prompt.opened, prompt.places, strict=True)
            ]
            count = TokenCount(len(prompt.tokens), context_length, prompt.tokens, images)
            name = self.front.intake.tokenizer.string if counting.return_token_strs else None
            await self.door.send_scroll(send, scroll_count(count, name))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.door.admission.admit(scope, receive) as (body, _):
            tokens = await self.door.read_body(read_detokenize, body)
            self.door.model_of(tokens.model)
            self.front.intake.limits.check_tokens("tokens", tokens.tokens)
            text = self.front.intake.tokenizer.decode(tokens.tokens)
            await send_json(send, TokenText(text))

    def _choices(
        self, shape: Shape, reply: Reply, view: PromptView
    ) -> Callable[[AnswerContext], Choices | PromptTeller]:
        """Return a function that makes a writer in OpenAI's words."""
        usage: UsageWanted = (
            "always" if reply.continuous_usage else "last" if reply.include_usage else None
        )

        def tell(context: AnswerContext) -> Choices | PromptTeller:
            writer = Writer(shape, self.door.model_of(reply.model)[0])
            choices = Choices(writer, context, usage)
            if view == PromptView():
                return choices
            return PromptTeller(choices, view, context.prepared, self.front.vocabulary)

        return tell

    def _model(self, name: str) -> Model:
        made = Model(name, self.started)
        if self.front.state == "ready":
            made.max_model_len = self.front.check_ready().context_length
        if not self.front.proven:
            made.unproven = True
        if name not in self.door.names:
            made.parent = self.door.names[0]
        return made

    async def models(self, _: Request) -> Response:
        names = [*self.door.names, *(each.name for each in self.front.adapters.loaded)]
        return json_response(ModelList([self._model(name) for name in names]))

    async def model(self, request: Request) -> Response:
        return json_response(self._model(self.door.model_of(request.path_params["name"])[0]))

    async def health(self, _: Request) -> Response:
        status, reason = self.front.health
        state = {"status": status, "model": self.door.names[0]}
        ready = status == "ready"
        body = state if ready else {**state, "reason": reason}
        response = json_response(body, 200 if ready else 503)
        response.headers[INSTANCE_HEADER] = self.instance
        return response

    async def liveness(self, _: Request) -> Response:
        """Answer 503 only if a restart would help: a loading server is alive."""
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
    """Counts responses by status code, and by the error's code."""

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
    """Admits requests with a right key, and all requests for open paths. A path that ends with a
    slash stands for all below it.
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
    """Answer Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    path, status, headers = request.url.path, error.status_code, error.headers
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    code, what = None, error.detail
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


async def _on_leaver(_: Request, __: Exception) -> Response:
    """Answer a departed client, who will not read it."""
    return Response(status_code=400)


async def _on_bug(request: Request, _: Exception) -> Response:
    return _error_response(request.scope, InternalError())


_HANDLERS = {
    RequestError: _on_request_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_leaver,
    Exception: _on_bug,
}
