"""Runs `saccade proxy`: listens, forwards requests, and prints the savings on exit."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from saccade.core.config import MIB
from saccade.core.metrics import ROUTED, Metrics
from saccade.core.options import ConnectionOptions
from saccade.edge.body import Bodies
from saccade.edge.headers import Stamp
from saccade.edge.http_server import Serving, address_of, listen
from saccade.edge.limits import ConnectionLimiter, raise_descriptors
from saccade.plugins.proxy.app import NamingProxy, ServerAddress
from saccade.plugins.proxy.options import ProxyOptions
from saccade.plugins.route.origins import guarded


class ProxyServer(Serving):
    """The HTTP server of the proxy, which forwards to one upstream server."""

    def __init__(self, options: ProxyOptions, edge: ConnectionOptions) -> None:
        """Create the proxy. Raises ConfigError."""
        self._options = options
        self.address = ServerAddress.read(options.upstream)
        metrics = Metrics(ROUTED)
        bodies = Bodies(options.inflight_bytes, metrics, edge.body_timeout)
        self.proxy = NamingProxy(self.address, options, bodies)
        super().__init__(
            guarded(self.proxy, options.host, options),
            ConnectionLimiter(edge, metrics),
            edge,
            options.max_body_mb * MIB,
            frozenset(),
            Stamp(options.cors_origins),
        )

    async def serve_until_shutdown(self, on_ready: Callable[[str], None]) -> None:
        """Serve until a signal (or `should_exit`). `on_ready` is called with the address.

        Raises StartupError if the address is not available.
        """
        bound = listen(self._options.host, self._options.port)
        try:
            on_ready(address_of(bound))
            await self.serve([bound])
        finally:
            self.proxy.close()
            bound.close()


def proxy(options: ProxyOptions, edge: ConnectionOptions) -> int:
    """Run `saccade proxy` until a signal. Returns the exit status. Raises StartupError."""
    raise_descriptors()
    server = ProxyServer(options, edge)

    def announce(address: str) -> None:
        print(f"  upstream  {server.address.name}")
        print("      does  sends each image's bytes once, then only its hash")
        print(f"proxy at {address}/v1", flush=True)

    uvloop.run(server.serve_until_shutdown(announce))
    print(f"{server.proxy.requests} requests; {server.proxy.sender.savings}", flush=True)
    return 0
