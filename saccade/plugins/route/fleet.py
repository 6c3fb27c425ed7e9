"""The workers: their readiness, their load, and the order in which they are asked.

Checks their health once a second, and counts this router's requests in flight to each.
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
"""A worker that takes longer to say how it is gets no new requests until it has."""
SILENT_SECONDS = 15.0
"""One that has said nothing for so long is taken to be dead: its requests end."""
MAX_HEALTH = 1 << 16
"""Bytes of what a worker says of its health."""
MAX_REASON = 400
"""Characters of it that others are shown."""
INSTANCE = INSTANCE_HEADER.encode()

State = Literal["unknown", "ready", "starting", "silent", "down"]


ASKED: tuple[State, ...] = ("ready", "silent")


class _Said(msgspec.Struct):
    """The health report of a worker that is not ready."""

    status: str
    reason: str = ""


class Backend:
    """A worker as the router knows it."""

    def __init__(self, url: str, name: str = "") -> None:
        address, host, port = parse_worker(url)
        self.name = name or address  # its URL, which ranks it, unless another is given
        self.authority = address.removeprefix("http://").encode()
        self.upstream = Upstream(host, port)
        self.state: State = "unknown"
        self.reason = "no health check yet"
        self.instance = ""  # the server run's name, "" while unknown
        self.load = 0  # this router's requests at the worker
        self.heard = 0.0
        self.doubted = False  # to be checked out of turn

    async def look(self) -> tuple[State, str]:
        """Ask the worker for its state and the reason. Raises WorkerDisconnected."""
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
            said = json_decoder(_Said).decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return "down", f"/health returned {head.status}"
        state: State = "starting" if said.status == "starting" else "down"
        return state, said.reason[:MAX_REASON] or said.status[:MAX_REASON]


class Fleet:
    """All workers, in the order of the command line."""

    def __init__(self, workers: Sequence[Backend], metrics: Metrics) -> None:
        """Take the workers. Raises ConfigError."""
        self.replicas = [*workers]
        names = [replica.name for replica in workers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--workers: {min(twice)} is a duplicate")
        self._by_name = dict(zip(names, self.replicas, strict=True))
        self._metrics = metrics
        self._looking: set[asyncio.Task[None]] = set()  # beside the watch

    @property
    def ready(self) -> list[Backend]:
        """Return the workers that may be asked.

        A silent worker may just be too busy to report, and is asked as a last resort.
        """
        of = {state: [each for each in self.replicas if each.state == state] for state in ASKED}
        return next((found for found in of.values() if found), [])

    def order(self, bearing: AffinityKey) -> list[Backend]:
        """Return the ready workers, in the order in which a request should try them."""
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
        """Yield the next worker for a request, which counts as the worker's load meanwhile.

        Yields `None` if no worker is left.
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
        """Count a request at `replica` while the context lasts."""
        replica.load += 1
        self._metrics.inc("saccade_route_requests_total", worker=replica.name)
        self._show(replica)
        try:
            yield
        finally:
            replica.load -= 1
            self._show(replica)

    def lost(self, replica: Backend, why: str) -> None:
        """Record that a worker has died under a request.

        It gets requests again once it reports itself ready.
        """
        self._note(replica, "down", why)

    def doubt(self, replica: Backend) -> None:
        """Check a worker's health now, as it has answered that it cannot serve.

        That may hold for this request alone.
        """
        if not replica.doubted:
            replica.doubted = True
            looking = asyncio.create_task(self._look(replica))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)

    async def watch(self) -> None:
        """Look at every worker once a second, for ever."""
        await asyncio.gather(*(self._watch(replica) for replica in self.replicas))

    async def look(self) -> None:
        """Look at every worker once."""
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
