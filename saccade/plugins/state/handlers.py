"""GET /saccade/state: the server and the answers in flight, for people."""

from __future__ import annotations

import time
from dataclasses import asdict

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade import __version__
from saccade.api.handlers import json_response
from saccade.api.mounting import ApiContext
from saccade.core.client import Client
from saccade.edge.headers import client_of
from saccade.front.request_manager import RequestManager
from saccade.media.media import Readable

MAX_SHOWN = 50
"""Answers in flight that /saccade/state lists."""


class Underway(Struct):
    """An answer on its way."""

    seconds: float
    """Seconds since the request arrived."""
    prompt_tokens: int
    images: int
    """Images in the prompt."""
    generated: int
    """Tokens generated so far."""


class ServerState(Struct):
    """The server as its page shows it. Times in seconds; `context_length` and `kv_tokens` are null
    until the model is loaded.


    `answers` are the longest on their way, at most `MAX_SHOWN`. A holder of one of several keys
    sees only its own answers.
    """

    status: str
    """starting, ready, stalled, stopping or failed."""
    reason: str
    """What still keeps the server from being ready."""
    model: str
    version: str
    """Saccade's version."""
    uptime: int
    """Seconds since the server started."""
    context_length: int | None
    """Maximum tokens for a prompt and its answer together."""
    kv_tokens: int | None
    """Tokens that the KV cache holds."""
    takes: tuple[Readable, ...]
    """What requests may hold besides text. frames means a list of video frames."""
    answers: list[Underway]
    """The running answers, longest first."""

    @classmethod
    def of(cls, front: RequestManager, model: str, started: int, client: Client) -> ServerState:
        """Take the server's present state. `started`: seconds since the epoch."""
        status, reason = front.health
        ready = front.check_ready() if front.state == "ready" else None
        return cls(
            status,
            reason,
            model,
            __version__,
            int(time.time()) - started,
            ready.context_length if ready else None,
            ready.kv_tokens if ready else None,
            front.intake.media.readable,
            [Underway(**asdict(each)) for each in front.in_flight(client, MAX_SHOWN)],
        )


def state_routes(api: ApiContext) -> list[Route]:
    handler = api.handler

    async def state(request: Request) -> Response:
        client = client_of(request.scope)
        return json_response(ServerState.of(handler.front, handler.names[0], api.started, client))

    return [Route("/saccade/state", state)]
