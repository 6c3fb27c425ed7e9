"""The HTTP side of `saccade route --models`: selects the server for a request, and lists models.

A request is sent to the server of the model that it names in the JSON field `model` or the header
x-saccade-model. Without a name, a request with a JSON body is sent to the server that stores the
response to continue, or else to the first model. Other requests (uploads, whose directory all
servers share, and pages) are sent to any running server. The router checks API keys itself, before
it starts a server.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.core.client import Client, Permits
from saccade.core.config import MIB
from saccade.core.decoders import json_decoder
from saccade.core.errors import InvalidRequest, Unauthorized
from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.edge.auth import Keys
from saccade.edge.body import Admission, BufferedBody, read_whole, while_connected
from saccade.edge.headers import CLIENT, client_of
from saccade.edge.related import first_part
from saccade.ipc.memory import MachineMemory
from saccade.plugins.model_router.config import DEFAULT_SHARE, ModelsConfig, in_gib, read_models
from saccade.plugins.model_router.pool import METRICS, ManagedModel, ModelPool
from saccade.plugins.route.affinity import HOLDER, AffinityKey, bearing_of_path
from saccade.plugins.route.proxy import OWN_PATHS, Forwarder, send_own
from saccade.plugins.route.relay import refusals, send_whole
from saccade.plugins.route.run import RouterContext

LIST = "/v1/models"
BATCHES = "/v1/batches"
MODEL_HEADER = b"x-saccade-model"


class _Body(msgspec.Struct):
    """The fields of a body that the router reads."""

    model: Any = None
    previous_response_id: Any = None


_read = json_decoder(_Body).decode


class ModelRouter:
    """The ASGI application that routes requests to the servers of models."""

    def __init__(self, context: RouterContext) -> None:
        """Read the file of models. Raises ConfigError."""
        options, self._metrics = context.options, context.metrics
        assert options.models is not None
        self._metrics.declare(METRICS)
        self._config = config = read_models(options.models)
        key = ServerOptions().key
        self._keys = Keys(key, KeySettings(config.api_keys_file))
        budget, self._budget_source = _budget(config)
        shared = ["--max-body-mb", str(options.max_body_mb)]
        shared += [word for each in options.cors_origins for word in ("--cors-origins", each)]
        if config.api_keys_file is not None:
            shared += ["--api-keys-file", str(Path(config.api_keys_file).absolute())]
        keys = {} if key is None else {"SACCADE_API_KEY": key}
        self._pool = ModelPool(config, budget, self._metrics, shared, keys)
        permits = Permits(options.max_requests, "--max-requests")
        largest = options.max_body_mb * MIB
        self._admission = Admission(permits, context.bodies, largest, lambda: None)
        self._threads = context.bodies.threads
        self._started = int(time.time())
        self._preflight: ASGIApp | None = None
        if origins := options.cors_origins:
            allow = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
            self._preflight = CORSMiddleware(self._serve_refusing, **allow)  # type: ignore[arg-type]
        self.app: ASGIApp = self._respond

    # ---- lifecycle

    async def start(self) -> None:
        """Do nothing, since servers start on demand."""

    async def watch(self) -> None:
        await self._pool.run()

    def begin_stop(self) -> None:
        self._pool.begin_stop()

    async def stop(self) -> None:
        await self._pool.stop()

    def described(self) -> list[tuple[str, str]]:
        config = self._config
        idle = "keep running" if config.idle is None else f"stop after {config.idle:g} s"
        waiting = (
            f"for {config.patience:g} s at most, {config.queue} for a model, "
            f"{config.max_waiting} in all"
        )
        return [
            *(("model", _described(model)) for model in self._pool.models),
            ("default", f"{self._pool.models[0].name}, for requests that name no model"),
            ("memory", f"{in_gib(self._pool.budget)} for all servers ({self._budget_source})"),
            ("idle servers", f"{idle}; at least {config.stay:g} s before another takes its place"),
            ("requests wait", waiting),
        ]

    # ---- requests

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._preflight is not None and scope["method"] == "OPTIONS":
            await self._preflight(scope, receive, send)
        else:
            await self._serve_refusing(scope, receive, send)

    async def _serve_refusing(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        async with refusals(path, send) as respond:
            if path in OWN_PATHS and reads:
                await send_own(path, respond, self._metrics, 200, self._health())
                return
            client = self._check_key(scope)
            if reads and path == LIST:
                models = [self._shown(model) for model in self._pool.models]
                await _send_json(respond, {"object": "list", "data": models})
            elif reads and path.startswith(f"{LIST}/"):
                model = self._pool.find(path.removeprefix(f"{LIST}/"))
                await _send_json(respond, self._shown(model))
            else:
                await self._forward(scope, receive, respond, client)

    def _check_key(self, scope: Scope) -> Client:
        if not len(self._keys):
            return client_of(scope)
        client = self._keys.client(scope)
        if client is None:
            raise Unauthorized(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY', "
                "'x-api-key: KEY' or 'api-key: KEY'"
            )
        scope[CLIENT] = client
        return client

    async def _forward(self, scope: Scope, receive: Receive, send: Send, client: Client) -> None:
        if scope["path"].startswith(BATCHES):
            raise InvalidRequest(
                "a router for several models does not support batches: send the lines as "
                "requests, or use a server of one model (saccade serve MODEL)",
                code="unsupported",
            )
        async with self._admission.admit(scope, receive, read_whole) as (body, held):
            model = await self._choose(scope, body)
            work = self._send_to(model, client, scope, send, body, held)
            await while_connected(receive, work)

    async def _send_to(
        self,
        model: ManagedModel,
        client: Client,
        scope: Scope,
        send: Send,
        body: bytearray,
        held: BufferedBody,
    ) -> None:
        async with self._pool.use(model, client.name or client.address) as fleet:
            await Forwarder(fleet, self._metrics).forward(scope, send, body, AffinityKey(), held)

    async def _choose(self, scope: Scope, body: bytearray) -> ManagedModel:
        headers = dict(scope["headers"])
        if named := headers.get(MODEL_HEADER, b"").decode("latin-1"):
            return self._pool.find(named)
        kind = headers.get(b"content-type", b"")
        if not body or kind.startswith(b"multipart/form-data"):
            holder = bearing_of_path(scope["path"]).holder
            return self._holder(holder) or self._pool.any_ready()
        read = await self._threads.run(len(body), partial(_read_body, body))
        if isinstance(read.model, str) and read.model:
            return self._pool.find(read.model)
        before = read.previous_response_id
        match = HOLDER.fullmatch(before) if isinstance(before, str) else None
        return (match and self._holder(match[1])) or self._pool.find("")

    def _holder(self, instance: str) -> ManagedModel | None:
        """Return the model whose running server stores a response, or None.

        instance: the server instance in the response's ID.
        """
        for model in self._pool.models:
            if instance and model.fleet and model.fleet.replicas[0].instance == instance:
                return model
        return None

    # ---- status

    def _shown(self, model: ManagedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "saccade",
            "aliases": model.config.names[1:],
            **model.state_fields(),
        }

    def _health(self) -> dict[str, Any]:
        models = [
            {
                "name": model.name,
                **model.state_fields(),
                "in_flight": model.leases,
                "waiting": len(model.waiting),
            }
            for model in self._pool.models
        ]
        return {"status": "ready", "models": models}


def _read_body(body: bytearray) -> _Body:
    """Read the fields that select a server. An invalid body has none of them, and the server will
    reject it.
    """
    try:
        return _read(bytes(first_part(body)) if body.startswith(b"--") else body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Body()


def _budget(config: ModelsConfig) -> tuple[int, str]:
    """Return the memory budget for all servers in bytes, and where that value comes from."""
    if config.memory is not None:
        return config.memory, "memory"
    left = min((room.left for room in MachineMemory().read()), default=0)
    return int(DEFAULT_SHARE * left), f"{DEFAULT_SHARE:.0%} of what is free"


def _described(model: ManagedModel) -> str:
    if model.config.memory is not None:
        size = f"{in_gib(model.config.memory)} (memory)"
    elif model.estimate is None:
        size = "all memory until it has run once, because it is not downloaded yet"
    else:
        size = f"{in_gib(model.estimate)} by its files"
    names = ", ".join(model.config.names)
    return " ".join((f"{names}: {model.config.model}", *model.config.args, f"({size})"))


async def _send_json(send: Send, content: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send_whole(send, 200, headers, msgspec.json.encode(content))
