"""The life of the server process: listen, start the engine, serve, and end in order.

The first SIGINT or SIGTERM lets the requests in flight finish within the grace time, then fails the
rest. A second SIGINT does not wait. When the engine dies, the server follows. Knows only how to put
the parts together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from saccade.api.app import OPEN_PATHS, build_app
from saccade.api.mounting import Services
from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.core.options import ServeOptions
from saccade.edge.headers import Stamp
from saccade.edge.http_server import Serving, address_of, listen
from saccade.edge.limits import ConnectionLimiter
from saccade.engine.link import EarlyEngine
from saccade.engine.startup_report import describe_intake
from saccade.front.adapters import read_names
from saccade.front.assemble import UNPROVEN, build_front
from saccade.front.loading import LoadingView
from saccade.front.request_manager import RequestManager
from saccade.ipc.memory import keep_freed, settle
from saccade.ipc.messages import Loading, Ready
from saccade.ipc.secrets import KEY_VARIABLES, forget

if TYPE_CHECKING:
    from saccade.api.trace.telemetry import Telemetry

log = logging.getLogger("saccade")

FAILED_SECONDS = 5.0
"""After the engine's death, clients and health checks get so long to see why, before the server
goes too.
"""

KEPT_BYTES = 160 << 20
"""Freed memory that stays for the next request. A body of 30 MB takes 78 MB, its texts and bytes
included.
"""
STOPPED_EARLY = 128 + signal.SIGINT
"""The exit status where Ctrl-C has ended start-up, as shells have it."""


class Server(Serving):
    """A uvicorn server that drains the front when told to stop."""

    def __init__(
        self, front: RequestManager, names: Sequence[str], options: ServeOptions, model: str = ""
    ) -> None:
        """Build the server. `model`: as `build_front` was told. Raises ConfigError for traces
        without the extra otel.
        """
        self._check: Callable[[], Awaitable[None]] | None = None
        if options.model.parity == "generate":
            from saccade.front.parity import check_parity

            self._check = partial(check_parity, front, model, options)
        url, edge = options.watch.traces_url, options.edge
        self._telemetry: Telemetry | None = None
        if url is not None:
            from saccade.api.trace.telemetry import Telemetry

            self._telemetry = Telemetry(url, front.metrics)
        record = None if self._telemetry is None else self._telemetry.record
        app = build_app(front, names, options, record)
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
        self._grace = edge.shutdown_grace
        self._failed_at: float | None = None

    async def run_until_told(
        self,
        on_ready: Callable[[str, Ready], None],
        on_progress: Callable[[Loading], None] = lambda _: None,
    ) -> bool:
        """Serve until a signal (or `should_exit`), with `/health` answering while the engine
        starts. Returns False if a signal came before the start.

        `on_ready` gets the address and the engine's decisions, `on_progress` how far loading is.
        Raises StartupError if the address cannot be had or the engine fails to start.
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
            if self._telemetry is not None:
                await asyncio.to_thread(self._telemetry.close)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome is None

    @property
    def interrupted(self) -> bool:
        """Return True if Ctrl-C has stopped the server."""
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
            if not (self._options.asks_for_key or ipaddress.ip_address(host).is_loopback):
                log.warning(
                    "--host %s without --api-key: whoever can reach this port may use the server",
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
            log.info("stopping; requests that run have %g s to finish", self._grace)
        await self._services.stop()
        draining = asyncio.create_task(self._front.drain(self._grace))
        await super().shutdown(sockets)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def serve(model: str, options: ServeOptions, early: EarlyEngine | None = None) -> int:
    """Serve `model` until a signal, or until the engine has failed: the command `saccade serve`.
    `early`: the engine, if that has begun.

    Returns the exit status. Raises StartupError.
    """
    # Once read, keys are in no process's environment.
    server = replace(options.server, api_key=options.server.key)
    role = replace(options.role, encoder_key=options.role.key or None)
    options = replace(options, server=server, role=role)
    forget(*KEY_VARIABLES)
    keep_freed(KEPT_BYTES)
    if options.watch.traces_url is not None:
        from saccade.api.trace.telemetry import check_installed

        check_installed()
    names = server.served_model_name or (model,)
    for name in read_names(options.answers.lora):
        if name in names:
            raise ConfigError(
                f"--lora {name}=...: {name!r} is the model's own name: choose another"
            )

    def announce(address: str, ready: Ready, front: RequestManager) -> None:
        served = f"{model}, served as {', '.join(names)}" if server.served_model_name else model
        settle()
        sent = describe_intake(options.media) if front.intake.spec.sees_images else ()
        trust = () if front.proven else (("unproven", UNPROVEN),)
        decided = (
            ("model", served),
            *trust,
            *ready.decided,
            *sent,
            *front.intake.answer_format.described(),
            *front.intake.described_actions(),
        )
        usual = f"{front.intake.limits.usual_length} where a request names no limit"
        decided = (*decided, *front.scoring.described(), ("answers", usual))
        width = max(len(name) for name, _ in decided)
        for name, value in decided:
            print(f"{name:>{width}}  {value}")
        print(f"serving at {address}/v1", flush=True)
        if role.role != "encode" and not server.disable_page:
            print(f"to try it in a browser: {address}/", flush=True)

    async def run() -> int:
        front = build_front(model, options, early)
        serving = Server(front, names, options, model)
        with LoadingView(Console()) as view:

            def on_ready(address: str, ready: Ready) -> None:
                view.close()
                announce(address, ready, front)

            started = await serving.run_until_told(on_ready, view.show)
        if not started and front.state != "failed":
            print("stopped before the model was loaded", flush=True)
            return STOPPED_EARLY if serving.interrupted else 0
        return int(front.state == "failed")

    return uvloop.run(run())
