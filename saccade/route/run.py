"""The life of the router's process: listen, check the workers, route, and end in order.

Leaves starting and ending workers to others. Knows nothing about routing but its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

from saccade.core.config import MIB
from saccade.core.metrics import ROUTED, Metrics
from saccade.core.options import ConnectionOptions
from saccade.core.route_options import RouteOptions
from saccade.edge.body import Bodies
from saccade.edge.headers import Stamp
from saccade.edge.http_server import Serving, address_of, listen
from saccade.edge.limits import ConnectionLimiter, raise_descriptors
from saccade.ipc.secrets import KEY_VARIABLES, forget
from saccade.route.fleet import Fleet
from saccade.route.origins import guarded
from saccade.route.proxy import OWN_PATHS, Proxy

OPEN_PATHS = OWN_PATHS - {"/metrics"}


class RouteServer(Serving):
    """Checks the workers as long as it serves."""

    def __init__(self, options: RouteOptions, edge: ConnectionOptions) -> None:
        """Build the router. Raises ConfigError."""
        self.metrics = Metrics(ROUTED)
        self._options = options
        self._fleet = Fleet(options.workers, self.metrics)
        crowd = ConnectionLimiter(edge, self.metrics)
        bodies = Bodies(options.inflight_bytes, self.metrics, edge.body_timeout)
        proxy = Proxy(self._fleet, options, self.metrics, bodies)
        super().__init__(
            guarded(proxy, options.host, options),
            crowd,
            edge,
            options.max_body_mb * MIB,
            OPEN_PATHS,
            Stamp(options.cors_origins),
        )
        self._connections = crowd.limit

    async def run_until_told(self, on_ready: Callable[[str], None]) -> None:
        """Route until a signal (or `should_exit`). `on_ready` gets the address.

        Raises StartupError when the address cannot be had.
        """
        bound = listen(self._options.host, self._options.port)
        try:
            await self._fleet.look()
            watching = asyncio.create_task(self._fleet.watch())
            on_ready(address_of(bound))
            try:
                await self.serve([bound])
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                for replica in self._fleet.replicas:
                    replica.upstream.drop()
        finally:
            bound.close()

    def described(self) -> list[tuple[str, str]]:
        """Return the router's decisions, for people."""
        options = self._options
        by = {
            "image": "the digest of a request's oldest image, else how its chat begins",
            "none": "nothing: any worker",
        }
        room = f"{options.max_body_mb} MiB at most, {options.inflight_bytes / MIB:.0f} MiB together"
        return [
            *(
                (
                    "worker",
                    f"{each.name}, {each.state}{f': {each.reason}' if each.reason else ''}",
                )
                for each in self._fleet.replicas
            ),
            ("ranked by", by[options.affinity]),
            ("bodies", room),
            ("requests", f"{options.max_requests} at a time on {self._connections} connections"),
        ]


def route(options: RouteOptions, edge: ConnectionOptions) -> int:
    """Run `saccade route` until a signal. Returns the exit status. Raises StartupError."""
    forget(*KEY_VARIABLES)  # they are the workers' to check
    raise_descriptors()
    router = RouteServer(options, edge)

    def announce(address: str) -> None:
        decided = router.described()
        width = max(len(name) for name, _ in decided)
        for name, value in decided:
            print(f"{name:>{width}}  {value}")
        print(f"routing at {address}/v1", flush=True)

    uvloop.run(router.run_until_told(announce))
    return 0
