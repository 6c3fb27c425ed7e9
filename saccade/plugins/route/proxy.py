"""The router's ASGI application. It forwards each request to the worker that is ranked first, and
streams the response back.

If a worker disconnects before the first byte of its response, the request is sent to another one.
The workers check keys, fields and limits. The router reads bodies only as far as `affinity.py`
needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from saccade import __version__
from saccade.core.client import Permits
from saccade.core.config import MIB
from saccade.core.errors import ReplicaLost
from saccade.core.metrics import Metrics
from saccade.edge.body import READ, Admission, Bodies, BufferedBody, read_whole, while_connected
from saccade.edge.headers import request_id
from saccade.edge.metrics_text import CONTENT_TYPE, render
from saccade.edge.upstream import WorkerDisconnected
from saccade.plugins.route.affinity import AffinityKey, bearing_of_body, bearing_of_path
from saccade.plugins.route.broadcast import broadcast, is_for_everyone
from saccade.plugins.route.fleet import Backend, Fleet
from saccade.plugins.route.heads import request_head
from saccade.plugins.route.options import SpreadOptions
from saccade.plugins.route.relay import pass_on, refusals, send_whole

log = logging.getLogger("saccade")

OWN_PATHS = frozenset({"/health", "/healthz", "/livez", "/metrics", "/ping", "/readyz", "/version"})
MAX_TRIES = 2
"""Maximum number of workers that may receive a request and disconnect before responding. Then the
request fails, because it may be what crashes them. In addition, it may be sent once more to the
same worker, if a reused connection turns out to be closed.
"""


class Forwarder:
    """Sends a request to the workers of a fleet, one after another, until one responds."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def forward(
        self, scope: Scope, send: Send, body: bytearray, bearing: AffinityKey, held: BufferedBody
    ) -> None:
        """Send a request to the workers, and stream the response to the client. The body is
        released when the response starts.

        Raises RequestError if there is no response.
        """
        tried: dict[Backend, str] = {}
        reached: set[Backend] = set()
        renewed = False
        while True:
            async with self._fleet.take_worker(bearing, tried) as replica:
                if replica is None:
                    break
                if tried:
                    self._metrics.inc("saccade_route_retries_total")
                try:
                    await self._exchange(replica, scope, send, body, held)
                    return
                except WorkerDisconnected as gone:
                    if gone.sent:
                        reached.add(replica)
                    if gone.stale and not renewed:
                        renewed = True
                        continue  # to the same worker, on a new connection
                    self._fleet.lost(replica, str(gone))
                    tried[replica] = str(gone)
                    if gone.begun or len(reached) >= MAX_TRIES:
                        break
        if not tried:
            self._fleet.check_ready()
        self._metrics.inc("saccade_route_broken_total")
        reasons = "; ".join(f"{replica.name}: {why}" for replica, why in tried.items())
        log.warning("%s: no worker responded: %s", request_id.get(), reasons)
        raise ReplicaLost(
            f"{len(tried)} of the {len(self._fleet.replicas)} workers were tried, and disconnected "
            "before responding: send the request again"
        )

    async def _exchange(
        self, replica: Backend, scope: Scope, send: Send, body: bytearray, held: BufferedBody
    ) -> None:
        """Send a request to one worker, and stream its response to the client.

        Raises WorkerDisconnected if the worker disconnects before the response has started.
        """
        head = request_head(scope, replica.authority, len(body))
        exchange = replica.upstream.exchange(scope["method"].encode(), head, body, again=False)
        async with exchange as (answer, content):
            if answer.status == 503:
                self._fleet.doubt(replica)
            with suppress(BufferError):  # some of it is still being sent
                body.clear()
                held.resize(0)
            await pass_on(scope["path"], send, answer, content, _BROKEN, self._note_broken)

    def _note_broken(self, gone: WorkerDisconnected) -> None:
        self._metrics.inc("saccade_route_broken_total")
        log.warning("%s: response cut off: %s", request_id.get(), gone)


class Proxy:
    """The ASGI application that forwards requests to workers."""

    def __init__(self, fleet: Fleet, options: SpreadOptions, metrics: Metrics, bodies: Bodies):
        self._fleet = fleet
        self._forwarder = Forwarder(fleet, metrics)
        self._options = options
        self._metrics = metrics
        permits = Permits(options.max_requests, "--max-requests")
        largest = options.max_body_mb * MIB
        self._admission = Admission(permits, bodies, largest, fleet.check_ready)
        self._threads = bodies.threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with refusals(scope["path"], send) as answer:
            if scope["path"] in OWN_PATHS and scope["method"] in ("GET", "HEAD"):
                status = 200 if self._fleet.ready else 503
                await send_own(scope["path"], answer, self._metrics, status, self._fleet.health())
            else:
                await self._serve(scope, receive, answer)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._admission.admit(scope, receive, read_whole) as (body, held):
            if is_for_everyone(scope["method"], scope["path"]):
                work = broadcast(self._fleet, scope, body, send)
            else:
                bearing = await self._bearing(scope, body)
                work = self._forwarder.forward(scope, send, body, bearing, held)
            await while_connected(receive, work)

    async def _bearing(self, scope: Scope, body: bytearray) -> AffinityKey:
        began = time.perf_counter()
        if not body:
            bearing = bearing_of_path(scope["path"])
        else:
            bearing = await self._threads.run(len(body), partial(bearing_of_body, body))
        self._metrics.observe("saccade_route_rank_seconds", time.perf_counter() - began)
        return bearing if self._options.affinity == "image" else bearing.blind()


async def send_own(
    path: str, send: Send, metrics: Metrics, status: int, health: Mapping[str, Any]
) -> None:
    """Send a response about the router itself: its metrics, version or health.

    health: the body of responses other than /metrics and /version.
    status: their status, except for /livez, which is always 200.
    """
    kind, content = b"application/json", b""
    if path == "/metrics":
        status, kind, content = 200, CONTENT_TYPE.encode(), render(metrics)
    elif path == "/version":
        status, content = 200, msgspec.json.encode({"version": __version__, "accepts": READ})
    else:
        status = 200 if path == "/livez" else status
        content = msgspec.json.encode(health)
    await send_whole(send, status, [(b"content-type", kind)], content)


_BROKEN = ReplicaLost("the worker disconnected during the response: send the request again")
