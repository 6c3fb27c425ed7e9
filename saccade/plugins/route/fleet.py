"""The workers of a router: their health, their load, and the order in which a request tries them.

Their health is checked once a second. A worker's load is the number of this router's requests in
flight to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec

from saccade.core.decoders import json_decoder
from saccade.core.errors import ConfigError, EngineUnavailable
from saccade.core.metrics import Metrics
from saccade.edge.headers import INSTANCE_HEADER
from saccade.edge.rank import rank
from saccade.edge.upstream import Upstream, WorkerDisconnected, parse_worker
from saccade.plugins.route.affinity import AffinityKey

log = logging.getLogger("saccade")

HEALTH_PAUSE = 1.0
HEALTH_SECONDS = 3.0
"""Maximum seconds of a health check. A slower worker gets no new requests until it responds in
time, unless no other worker is ready.
"""
SILENT_SECONDS = 15.0
"""Seconds without a response to health checks, after which a worker is considered dead and its
requests fail.
"""
MAX_HEALTH = 1 << 16
"""Maximum bytes of a response to a health check."""
MAX_REASON = 400
"""Maximum characters of a worker's reason that are reported to clients."""
INSTANCE = INSTANCE_HEADER.encode()

State = Literal["unknown", "ready", "starting", "silent", "down"]


ASKED: tuple[State, ...] = ("ready", "silent")


class _WorkerReply(msgspec.Struct):
    """The body of /health of a worker that is not ready."""

    status: str
    reason: str = ""


class Backend:
    """A worker, with its health and load as this router sees them."""

    def __init__(self, url: str, name: str = "") -> None:
        address, host, port = parse_worker(url)
        self.name = name or address  # used for ranking; by default its URL
        self.authority = address.removeprefix("http://").encode()
        self.upstream = Upstream(host, port)
        self.state: State = "unknown"
        self.reason = "no health check yet"
        self.instance = ""  # the name of the server's instance; "" if not known yet
        self.load = 0  # this router's requests in flight to the worker
        self.heard = 0.0  # event loop time of its last health response
        self.doubted = False  # whether an extra health check is scheduled

    async def look(self) -> tuple[State, str]:
        """Request the worker's health. Returns its state and the reason for it.

        Raises WorkerDisconnected.
        """
        request = b"GET /health HTTP/1.1\r\nhost: " + self.authority + b"\r\n\r\n"
        content = b""
        async with self.upstream.exchange(b"GET", request) as (head, pieces):
            async for piece in pieces:
                content += piece
                if len(content) > MAX_HEALTH:
                    raise WorkerDisconnected("its /health response is too long", begun=True)
        self.instance = dict(head.headers).get(INSTANCE, b"").decode("latin-1")
        if head.status == 200:
            return "ready", ""
        try:
            said = json_decoder(_WorkerReply).decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return "down", f"/health returned {head.status}"
        state: State = "starting" if said.status == "starting" else "down"
        return state, said.reason[:MAX_REASON] or said.status[:MAX_REASON]


class Fleet:
    """All workers, in the order of the command line."""

    def __init__(self, workers: Sequence[Backend], metrics: Metrics) -> None:
        """Create a fleet of `workers`. Raises ConfigError if two have the same name."""
        self.replicas = [*workers]
        names = [replica.name for replica in workers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--workers: {min(twice)} is a duplicate")
        self._by_name = dict(zip(names, self.replicas, strict=True))
        self._metrics = metrics
        self._looking: set[asyncio.Task[None]] = set()  # extra health checks

    @property
    def ready(self) -> list[Backend]:
        """The workers that requests can be sent to: those that are ready. If there are none, those
        that are silent, because they may only be too busy to respond.
        """
        of = {state: [each for each in self.replicas if each.state == state] for state in ASKED}
        return next((found for found in of.values() if found), [])

    def order(self, bearing: AffinityKey) -> list[Backend]:
        """Return the ready workers, in the order in which a request with this key tries them."""
        ready = self.ready
        load = {replica.name: replica.load for replica in ready}
        ranked = [self._by_name[name] for name in rank(bearing.keys, [*load], load)]
        if bearing.holder:
            ranked.sort(key=lambda replica: replica.instance != bearing.holder)
        return ranked

    @asynccontextmanager
    async def take_worker(
        self, bearing: AffinityKey, tried: Container[Backend]
    ) -> AsyncIterator[Backend | None]:
        """Yield the next worker for a request, or `None` if all were tried. While the context is
        open, the request counts in the load of the worker.
        """
        replica = next((each for each in self.order(bearing) if each not in tried), None)
        if replica is None:
            yield None
        else:
            with self.count(replica):
                yield replica

    def health(self) -> dict[str, Any]:
        """Return the content of `/health`."""
        workers = [
            {
                "url": replica.name,
                "status": replica.state,
                "in_flight": replica.load,
                **({"reason": replica.reason} if replica.reason else {}),
            }
            for replica in self.replicas
        ]
        if self.ready:
            return {"status": "ready", "workers": workers}
        return {"status": "down", "reason": "no worker is ready", "workers": workers}

    def check_ready(self) -> None:
        """Raise EngineUnavailable unless a worker is ready."""
        if not self.ready:
            raise EngineUnavailable(
                f"none of the {len(self.replicas)} workers is ready (see GET /health): try again"
            )

    @contextmanager
    def count(self, replica: Backend) -> Iterator[None]:
        """Count a request in the load of `replica` while the context is open."""
        replica.load += 1
        self._metrics.inc("saccade_route_requests_total", worker=replica.name)
        self._show(replica)
        try:
            yield
        finally:
            replica.load -= 1
            self._show(replica)

    def lost(self, replica: Backend, why: str) -> None:
        """Record that a worker disconnected during a request. It gets no new requests until a
        health check succeeds.
        """
        self._note(replica, "down", why)

    def doubt(self, replica: Backend) -> None:
        """Check a worker's health immediately, because it responded to a request with 503. The
        cause may be only that request, so the state of the worker is not changed yet.
        """
        if not replica.doubted:
            replica.doubted = True
            looking = asyncio.create_task(self._look(replica))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)

    async def watch(self) -> None:
        """Check the health of all workers once a second, until this task is cancelled."""
        await asyncio.gather(*(self._watch(replica) for replica in self.replicas))

    async def look(self) -> None:
        """Check the health of all workers once."""
        await asyncio.gather(*(self._look(replica) for replica in self.replicas))

    async def _watch(self, replica: Backend) -> None:
        while True:
            await asyncio.sleep(HEALTH_PAUSE)
            await self._look(replica)

    async def _look(self, replica: Backend) -> None:
        loop = asyncio.get_running_loop()
        replica.doubted = False
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                state, why = await replica.look()
            replica.heard = loop.time()
        except TimeoutError:
            state, why = "silent", f"/health did not respond for {HEALTH_SECONDS:g} s"
            if loop.time() - replica.heard > SILENT_SECONDS:
                replica.upstream.drop()
        except WorkerDisconnected as gone:
            state, why = "down", str(gone)
        self._note(replica, state, why)

    def _note(self, replica: Backend, state: State, why: str) -> None:
        if state != replica.state:
            tell = log.info if state == "ready" else log.warning
            tell("%s is %s%s", replica.name, state, f": {why}" if why else "")
        replica.state, replica.reason = state, why
        self._show(replica)

    def _show(self, replica: Backend) -> None:
        self._metrics.set("saccade_route_in_flight", replica.load, worker=replica.name)
        self._metrics.set("saccade_route_ready", int(replica.state == "ready"), worker=replica.name)
