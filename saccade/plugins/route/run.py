"""The process of `saccade route`: it listens, monitors the servers, and forwards requests. A plugin
adds a router that starts and stops servers itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import uvloop
from starlette.types import ASGIApp

from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.core.metrics import ROUTED, Metrics
from saccade.core.options import ConnectionOptions
from saccade.edge.body import Bodies
from saccade.edge.headers import Stamp
from saccade.edge.http_server import Serving, address_of, listen
from saccade.edge.limits import ConnectionLimiter, raise_descriptors
from saccade.ipc.environment import KEY_VARIABLES, forget
from saccade.plugins import builder
from saccade.plugins.route.fleet import Backend, Fleet
from saccade.plugins.route.options import RouteOptions
from saccade.plugins.route.origins import guarded
from saccade.plugins.route.proxy import OWN_PATHS, Proxy

OPEN_PATHS = OWN_PATHS - {"/metrics"}


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The arguments that an implementation of `Upstreams` is created with."""

    options: RouteOptions
    metrics: Metrics
    bodies: Bodies


class Upstreams(Protocol):
    """The servers of a router, and the application that forwards requests to them."""

    app: ASGIApp

    async def start(self) -> None:
        """Prepare for requests. It is called before the router listens."""

    async def watch(self) -> None:
        """Monitor the servers until this task is cancelled."""

    def begin_stop(self) -> None:
        """Reject all requests that would have to wait, because the router stops as soon as the
        running requests have finished.
        """

    async def stop(self) -> None:
        """Close all connections, and stop the servers that the router has started."""

    def described(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs that describe the servers, for the startup message."""


class FixedWorkers:
    """The servers that the option --workers lists."""

    def __init__(self, context: RouterContext) -> None:
        """Read the workers' URLs from the options. Raises ConfigError."""
        options = context.options
        self._affinity = options.affinity
        self._fleet = Fleet([Backend(url) for url in options.workers], context.metrics)
        self.app: ASGIApp = Proxy(self._fleet, options, context.metrics, context.bodies)

    async def start(self) -> None:
        await self._fleet.look()

    async def watch(self) -> None:
        await self._fleet.watch()

    def begin_stop(self) -> None:
        """Do nothing, since no request waits for a worker."""

    async def stop(self) -> None:
        for replica in self._fleet.replicas:
            replica.upstream.drop()

    def described(self) -> list[tuple[str, str]]:
        by = {
            "image": "the digest of a request's oldest image, else the start of the chat",
            "none": "none: any worker",
        }
        return [
            *(
                (
                    "worker",
                    f"{each.name}, {each.state}{f': {each.reason}' if each.reason else ''}",
                )
                for each in self._fleet.replicas
            ),
            ("ranked by", by[self._affinity]),
        ]


def build_upstreams(context: RouterContext) -> Upstreams:
    """Create the servers, as the options specify. Raises ConfigError."""
    build: Callable[[RouterContext], Upstreams] | None
    build = builder(lambda plugin: plugin.upstreams, context.options)
    if build is None and context.options.models is not None:
        raise ConfigError("--models: this installation has no plugin for it: give --workers")
    return FixedWorkers(context) if build is None else build(context)


class RouteServer(Serving):
    """The HTTP server of the router. It monitors the upstream servers while it runs."""

    def __init__(self, options: RouteOptions, edge: ConnectionOptions) -> None:
        """Create the router. Raises ConfigError."""
        self.metrics = Metrics(ROUTED)
        self._options = options
        bodies = Bodies(options.inflight_bytes, self.metrics, edge.body_timeout)
        self._upstreams = build_upstreams(RouterContext(options, self.metrics, bodies))
        crowd = ConnectionLimiter(edge, self.metrics)
        super().__init__(
            guarded(self._upstreams.app, options.host, options),
            crowd,
            edge,
            options.max_body_mb * MIB,
            OPEN_PATHS,
            Stamp(options.cors_origins),
        )
        self._connections = crowd.limit

    async def serve_until_shutdown(self, on_ready: Callable[[str], None]) -> None:
        """Route requests until a signal (or `should_exit`). `on_ready` is called with the address.

        Raises StartupError if the address is not available.
        """
        bound = listen(self._options.host, self._options.port)
        try:
            await self._upstreams.start()
            watching = asyncio.create_task(self._upstreams.watch())
            on_ready(address_of(bound))
            try:
                await self.serve([bound])
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await self._upstreams.stop()
        finally:
            bound.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._upstreams.begin_stop()
        await super().shutdown(sockets)

    def described(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs that describe the router, for the startup message."""
        options = self._options
        room = f"{options.max_body_mb} MiB at most, {options.inflight_bytes / MIB:.0f} MiB together"
        return [
            *self._upstreams.described(),
            ("bodies", room),
            ("requests", f"{options.max_requests} at a time on {self._connections} connections"),
        ]


def route(options: RouteOptions, edge: ConnectionOptions) -> int:
    """Run `saccade route` until a signal. Returns the exit status. Raises StartupError."""
    raise_descriptors()
    router = RouteServer(options, edge)
    forget(*KEY_VARIABLES)  # only the workers check keys

    def announce(address: str) -> None:
        decided = router.described()
        width = max(len(name) for name, _ in decided)
        for name, value in decided:
            print(f"{name:>{width}}  {value}")
        print(f"routing at {address}/v1", flush=True)

    uvloop.run(router.serve_until_shutdown(announce))
    return 0
