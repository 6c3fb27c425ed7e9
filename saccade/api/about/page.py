"""GET /: a page to try the server with, and GET /saccade/state, which tells the page about running
requests.

Owns the page's files and their permissions. `web/` has HTML, styles and JavaScript modules, and in
`vendor/` libraries as their authors published them. The page fetches only these. The browser does
the work, through every client's API. Knows nothing of requests but the front's news of those in
flight.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade import __version__
from saccade.api.handlers import json_response
from saccade.api.mounting import ApiContext
from saccade.core.client import Client
from saccade.edge.auth import client_of
from saccade.front.request_manager import RequestManager
from saccade.media.media import Readable

WEB = Path(__file__).parent / "web"
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    "/" if path.name == INDEX else f"/page/{path.relative_to(WEB).as_posix()}": path
    for path in WEB.rglob("*")
    if path.suffix in KINDS
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Content-Security-Policy: no script, style or request but this server's own, and no text that
becomes HTML but through the sanitiser (`web/vendor/purify.min.js`), whose policy `dompurify` is.
"""
MOST_SHOWN = 50
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


    `answers` are the longest on their way, at most `MOST_SHOWN`. A holder of one of several keys
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
            [Underway(**asdict(each)) for each in front.in_flight(client, MOST_SHOWN)],
        )


def state_routes(api: ApiContext) -> list[Route]:
    handler = api.handler

    async def state(request: Request) -> Response:
        client = client_of(request.scope)
        return json_response(ServerState.of(handler.front, handler.names[0], api.started, client))

    return [Route("/saccade/state", state)]


def page_routes(_: ApiContext) -> list[Route]:
    """Build a route for each of the page's files, which are read once."""
    return [Route(path, ServedFile(file, POLICY).answer) for path, file in FILES.items()]


class ServedFile:
    """One file, as at the server's start. `policy`: its Content-Security-Policy."""

    def __init__(self, path: Path, policy: str) -> None:
        self._body = path.read_bytes()
        self._kind = KINDS[path.suffix]
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
            "etag": self._tag,
        }

    async def answer(self, request: Request) -> Response:
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type=self._kind)
