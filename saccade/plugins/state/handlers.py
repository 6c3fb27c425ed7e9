"""GET /saccade/state: the server's state and the answers in progress, for the web UI."""

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
"""Maximum answers in progress that /saccade/state lists."""


class Underway(Struct):
    """An answer in progress."""

    seconds: float
    """Seconds since the request arrived."""
    prompt_tokens: int
    images: int
    """The number of images in the prompt."""
    generated: int
    """The number of tokens generated so far."""


class ServerState(Struct):
    """The server's state, for the web UI. Times are in seconds. `context_length` and `kv_tokens`
    are null until the model is loaded.

    `answers` has the longest-running answers in progress, at most `MAX_SHOWN`. If there are several
    API keys, clients see only their own answers.
    """

    status: str
    """starting, ready, stalled, stopping or failed."""
    reason: str
    """The reason why the server is not ready yet."""
    model: str
    version: str
    """Saccade's version."""
    uptime: int
    """Seconds since the server started."""
    context_length: int | None
    """Maximum tokens of a prompt and its answer together."""
    kv_tokens: int | None
    """The capacity of the KV cache in tokens."""
    takes: tuple[Readable, ...]
    """What requests may contain besides text. frames: videos as lists of images."""
    answers: list[Underway]
    """The answers in progress, the longest-running first."""

    @classmethod
    def of(cls, front: RequestManager, model: str, started: int, client: Client) -> ServerState:
        """Return the server's current state.

        started: the time at which the server was started, in seconds since the epoch.
        """
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
