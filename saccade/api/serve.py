"""The process of `saccade serve`: listen, start the engine, serve, and shut down.

The first SIGINT or SIGTERM lets requests in flight finish within the grace time, then fails the
rest. A second SIGINT stops the server immediately. If the engine exits, so does the server.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from saccade.api.app import OPEN_PATHS, build_app
from saccade.api.mounting import Services
from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.core.options import ServeOptions
from saccade.core.settings import AdapterSettings
from saccade.edge.headers import Stamp
from saccade.edge.http_server import Serving, address_of, listen
from saccade.edge.limits import ConnectionLimiter
from saccade.engine.link import EarlyEngine
from saccade.front.assemble import UNPROVEN, build_front, describe_media_limits, parity_check
from saccade.front.loading import LoadingView
from saccade.front.request_manager import RequestManager
from saccade.ipc.environment import KEY_VARIABLES, forget
from saccade.ipc.memory import keep_freed, settle
from saccade.ipc.messages import Loading, Ready
from saccade.plugin import Plugin
from saccade.plugins import asked_plugins

if TYPE_CHECKING:
    from saccade.api.trace.request_trace import TimelineRecorder

log = logging.getLogger("saccade")

FAILED_SECONDS = 5.0
"""How long the server keeps running after the engine has failed, so that clients and health checks
can read the reason.
"""

KEPT_BYTES = 160 << 20
"""How much freed memory malloc keeps for the next request. A body of 30 MB, with its strings and
decoded bytes, takes 78 MB.
"""
STOPPED_EARLY = 128 + signal.SIGINT
"""The exit status if Ctrl-C stops the server while it starts, as in shells."""


class Server(Serving):
    """An HTTP server that lets its requests finish on shutdown."""

    def __init__(
        self,
        front: RequestManager,
        names: Sequence[str],
        options: ServeOptions,
        plugins: tuple[Plugin, ...],
        model: str = "",
    ) -> None:
        """Build the application. plugins: the enabled plugins. model: the MODEL argument."""
        self._check = parity_check(front, model, options)
        edge = options.edge
        self._recorders: list[TimelineRecorder] = [
            resolve_name(plugin.http.recorder)(options, front.metrics)
            for plugin in plugins
            if plugin.http.recorder
        ]
        app = build_app(front, names, options, plugins, self._recorders)
        self._services: Services = app.state.services
        super().__init__(
            app,
            ConnectionLimiter(edge, front.metrics),
            edge,
            options.server.max_body_mb * MIB,
            OPEN_PATHS,
            Stamp(options.server.cors_origins),
        )
        self._front = front
        self._options = options.server
        self._asks_for_key = options.asks_for_key
        self._grace = edge.shutdown_grace
        self._failed_at: float | None = None

    async def serve_until_shutdown(
        self,
        on_ready: Callable[[str, Ready], None],
        on_progress: Callable[[Loading], None] = lambda _: None,
    ) -> bool:
        """Serve until a signal is received or `should_exit` is set. `/health` responds while the
        engine starts.

        on_ready: called with the server's address and the engine's `Ready` message.
        on_progress: called with the progress of loading.

        Returns False if a signal stopped the server before it was ready. Raises StartupError if the
        address is not available or the engine fails to start.
        """
        bound = listen(self._options.host, self._options.port)
        starting = asyncio.create_task(self._start(bound, on_ready, on_progress))
        try:
            await self.serve([bound])
        finally:
            bound.close()
            starting.cancel()
            outcome = (await asyncio.gather(starting, return_exceptions=True))[0]
            await self._front.stop()
            for recorder in self._recorders:
                await asyncio.to_thread(recorder.close)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome is None

    @property
    def interrupted(self) -> bool:
        """True if the server received SIGINT (Ctrl-C)."""
        return signal.SIGINT in self._captured_signals

    async def _start(
        self,
        bound: socket.socket,
        on_ready: Callable[[str, Ready], None],
        on_progress: Callable[[Loading], None],
    ) -> None:
        address, host = address_of(bound), bound.getsockname()[0]
        try:
            ready = await self._front.start(on_progress, self._check)
            if not (self._asks_for_key or ipaddress.ip_address(host).is_loopback):
                log.warning(
                    "--host %s without --api-key: anyone who can reach this port can use the "
                    "server",
                    self._options.host,
                )
            self._services.start()
            on_ready(address, ready)
        except BaseException:
            self.should_exit = True
            raise

    async def on_tick(self, counter: int) -> bool:
        if self._front.state == "failed" and not self.should_exit:
            self._failed_at = self._failed_at or time.monotonic()
            self.should_exit = time.monotonic() - self._failed_at > FAILED_SECONDS
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._front.state == "ready":
            log.info("shutting down; requests in flight have %g s to finish", self._grace)
        await self._services.stop()
        draining = asyncio.create_task(self._front.drain(self._grace))
        await super().shutdown(sockets)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def serve(model: str, options: ServeOptions, early: EarlyEngine | None = None) -> int:
    """Run the command `saccade serve`: serve `model` until a signal is received or the engine
    fails.

    early: the engine process, if it was started before.

    Returns the exit status. Raises StartupError.
    """
    # Keys are removed from the environment once they are read, so that no child process has them.
    options = options.read_environment()
    forget(*KEY_VARIABLES)
    keep_freed(KEPT_BYTES)
    plugins = asked_plugins(options)
    server = options.server
    names = server.served_model_name or (model,)
    for name in options.of(AdapterSettings).folders:
        if name in names:
            raise ConfigError(
                f"--lora {name}=...: {name!r} is the name of the base model: choose another"
            )

    def announce(address: str, ready: Ready, front: RequestManager) -> None:
        served = f"{model}, served as {', '.join(names)}" if server.served_model_name else model
        settle()
        sent = describe_media_limits(options.media) if front.intake.spec.sees_images else ()
        trust = () if front.proven else (("unproven", UNPROVEN),)
        decided = (
            ("model", served),
            *trust,
            *ready.decided,
            *sent,
            *front.intake.answer_format.described(),
        )
        usual = f"{front.intake.limits.usual_length} if a request sets no limit"
        tasks = () if front.scoring is None else front.scoring.described()
        decided = (*decided, *tasks, ("answers", usual))
        width = max(len(name) for name, _ in decided)
        for name, value in decided:
            print(f"{name:>{width}}  {value}")
        print(f"serving at {address}/v1", flush=True)
        if any("/" in plugin.http.paths for plugin in plugins):
            print(f"web UI: {address}/", flush=True)

    async def run() -> int:
        front = build_front(model, options, early, plugins)
        serving = Server(front, names, options, plugins, model)
        with LoadingView(Console()) as view:

            def on_ready(address: str, ready: Ready) -> None:
                view.close()
                announce(address, ready, front)

            started = await serving.serve_until_shutdown(on_ready, view.show)
        if not started and front.state != "failed":
            print("stopped before the model was loaded", flush=True)
            return STOPPED_EARLY if serving.interrupted else 0
        return int(front.state == "failed")

    return uvloop.run(run())
