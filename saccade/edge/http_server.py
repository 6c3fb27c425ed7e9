"""An HTTP server for any ASGI application, with its own socket, connections and signal handling.

The first SIGINT or SIGTERM lets requests in flight finish. `api/serve.py` and `saccade route`
provide the applications.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn import Server as Uvicorn

from saccade.core.errors import StartupError
from saccade.core.options import ConnectionOptions
from saccade.edge.connection import connections
from saccade.edge.headers import Stamp
from saccade.edge.limits import ConnectionLimiter
from saccade.edge.listener import Listener

TICKS = 10
"""Connections are checked once a second, which is every `TICKS` calls of `on_tick` by uvicorn."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`. Raises StartupError if the address is in use or
    unknown.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another address with --host "
            "and --port"
        ) from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the URL of the server that listens on the socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Serving(Uvicorn):
    """uvicorn's server with `Connection`s. It restores the previous signal handlers when it
    stops.
    """

    def __init__(
        self,
        app: ASGIApp,
        crowd: ConnectionLimiter,
        edge: ConnectionOptions,
        largest: int,
        open_paths: frozenset[str],
        stamp: Stamp,
    ) -> None:
        """Configure uvicorn.

        largest: maximum size of a body in bytes.
        open_paths: the only paths that connections over the connection limit can request.
        """
        paths = frozenset(path.encode() for path in open_paths)
        config = Config(
            app,
            http=connections(crowd, edge, largest, paths, stamp),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=edge.keep_alive_timeout,  # type: ignore[arg-type]
            # Connections that are open after draining are still sending a request, so do not wait.
            timeout_graceful_shutdown=int(edge.shutdown_grace) + 1,
        )
        super().__init__(config)
        self._limiter = crowd
        self.servers = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections. Unlike uvicorn's own method, accept only a few in each
        iteration of the event loop.
        """
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        factory = partial(
            make,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [Listener(each, factory) for each in sockets or ()]  # type: ignore[misc]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self._limiter.check(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method raises the signal again at the end, which would prevent a clean
        # shutdown of the application.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
