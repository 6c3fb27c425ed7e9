"""Runs Saccade on Ray Serve: `serve run saccade.plugins.ray.serving:app model=MODEL`, or with the
file that `saccade deploy ray` writes.

There are two or three deployments. In `engine`, each replica owns a `saccade serve` process
(`server_process.py`). The optional `encoder` owns servers with role encode, whose addresses the
replicas of `engine` pass to their own server. `ingress` is the router of `saccade route`
(`proxy.py`), except that Ray lists the replicas, and selects one with `DigestAffinityRouter`, in
the order of `rank.py`. Ray reserves a slot at the replica during the request. The request itself is
sent from the ingress to the server by HTTP, so that streams, aborts, files, errors and retries work
as in `saccade route`.

This is the only module that imports Ray (the extra `ray`). Only Ray imports it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Container, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingContext, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message, Receive, Scope, Send

from saccade.core.decoders import convert
from saccade.core.errors import Overloaded
from saccade.core.metrics import ROUTED, Metrics
from saccade.edge.body import Bodies
from saccade.edge.rank import rank
from saccade.ipc.environment import KEY_VARIABLES, forget
from saccade.plugins.ray.deploy import ENCODER, ENGINE, INGRESS, REQUESTS
from saccade.plugins.route.affinity import AffinityKey
from saccade.plugins.route.fleet import Backend, Fleet
from saccade.plugins.route.options import SpreadOptions
from saccade.plugins.route.origins import guarded
from saccade.plugins.route.proxy import Proxy
from saccade.plugins.route.server_process import OwnedServer

log = logging.getLogger("saccade")

PLACE_SECONDS = 30.0
"""Maximum seconds that a request waits for a slot at a server."""
LIST_SECONDS = 1.0
"""Seconds between two updates of the list of replicas."""
LIST_TIMEOUT = 5.0
BODY_SECONDS = 300.0
NOT_OURS = frozenset((b"x-request-id", b"date", b"server"))
"""Response headers that Ray's own HTTP server sets."""


class AppArgs(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of `app`.

    options: the options of `saccade serve`, as a list or one string.
    encoders: whether there is a deployment of encoders.
    host: the address on which Ray Serve listens (its `http_options`).
    """

    model: str = "demo"
    options: list[str] | str = []
    encoders: bool = False
    affinity: str = "image"
    max_body_mb: int = 256
    max_inflight_mb: int | None = None
    max_requests: int = 4096
    host: str = "127.0.0.1"
    allowed_hosts: list[str] | str = []
    cors_origins: list[str] | str = []


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application from its arguments. Raises msgspec.ValidationError and ConfigError."""
    settings = convert(args, AppArgs, strict=False)
    spread = SpreadOptions(
        affinity="none" if settings.affinity == "none" else "image",
        max_body_mb=settings.max_body_mb,
        max_inflight_mb=settings.max_inflight_mb,
        max_requests=settings.max_requests,
        cors_origins=tuple(_words(settings.cors_origins)),
        allowed_hosts=tuple(_words(settings.allowed_hosts)),
    )
    options = _words(settings.options)

    def build() -> RayIngress:
        """Create the ingress. Ray calls this in the ingress's process."""
        name = serve.get_replica_context().app_name
        return RayIngress(serve.get_deployment_handle(ENGINE, name), spread, settings.host)

    owning = serve.deployment(
        name=ENGINE, max_ongoing_requests=256, health_check_period_s=2, health_check_timeout_s=10
    )(RayEngine)
    routed = RequestRouterConfig(request_router_class=DigestAffinityRouter)
    engine = owning.options(request_router_config=routed)
    encoders = None
    if settings.encoders:
        encoders = owning.options(name=ENCODER).bind(settings.model, [*options, "--role", "encode"])
    ingress = serve.deployment(serve.ingress(build)(), name=INGRESS, max_ongoing_requests=4096)
    return ingress.bind(engine.bind(settings.model, options, encoders))


def _words(words: list[str] | str) -> list[str]:
    return shlex.split(words) if isinstance(words, str) else words


# ---- servers


class RayEngine:
    """A replica, which owns one server. It answers Ray's calls with information from its server."""

    def __init__(
        self, model: str, options: Sequence[str], encoders: DeploymentHandle | None = None
    ) -> None:
        """Start the server, and wait until it is ready. Raises StartupError.

        encoders: the deployment that encodes the server's images. With `None`, the server encodes
        them itself.
        """
        self._ending = False
        self._encoders = encoders
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-")
        self._list = Path(self._folder.name) / "encoders"
        self._listed: list[str] = []
        if encoders is not None:
            self._list.touch()
            options = [*options, "--role", "language", "--encoders", str(self._list)]
        self._server = OwnedServer(model, options, ray.util.get_node_ip_address())
        forget(*KEY_VARIABLES)  # the server has read them
        self._url = self._server.ready()
        self._server.ended.add_done_callback(self._follow)

    def _follow(self, ended: Future[int]) -> None:
        """Exit when the server exits unexpectedly, so that Ray starts another replica."""
        if not self._ending:
            log.error("the server exited with %s; its replica stops", ended.result())
            os._exit(1)

    async def where(self) -> dict[str, str]:
        """Return the ID of the replica, the URL of its server, and the ID of the server's
        instance.
        """
        name = serve.get_replica_context().replica_id.unique_id
        return {"name": name, "url": self._url, "instance": await self._server.health()}

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return information for routers that never changes."""
        return await self.where()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return information for routers that changes. Ray calls this every few seconds."""
        return await self._server.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `by_queue`."""
        stats = await self._server.stats()
        return {REQUESTS: stats["running"] + stats["waiting"]}

    async def check_health(self) -> None:
        """Raise RuntimeError if the server is not healthy.

        Ray also calls this before the first request.
        """
        await self._server.health()
        await self._tell()

    async def _tell(self) -> None:
        """Send the addresses of the encoders to the server. Called at each of Ray's health
        checks.
        """
        if self._encoders is None:
            return
        try:
            asking = self._encoders.broadcast("where")
            replies = await asking.results_async(timeout_s=LIST_TIMEOUT, return_exceptions=True)
        except Exception as error:
            log.warning("cannot list the encoders from Ray: %s", error)
            return
        urls = sorted(each["url"] for each in replies if isinstance(each, dict))
        if urls != self._listed:
            new = self._list.with_suffix(".new")
            new.write_text("".join(f"{url}\n" for url in urls))
            new.replace(self._list)
            self._listed = urls

    async def __del__(self) -> None:
        """Stop the server. Ray has already waited for its requests."""
        self._ending = True
        await self._server.stop()
        self._folder.cleanup()


def by_queue(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of servers, as an autoscaling policy of Ray.

    It is the number of requests, running or waiting anywhere, divided by `target_ongoing_requests`.
    """
    requests = (context.aggregated_metrics or {}).get(REQUESTS, {})
    if not requests:
        return context.target_num_replicas, {}
    waiting = sum(requests.values()) + (context.total_queued_requests or 0)
    return waiting / context.config.get_target_ongoing_requests(), {}


class DigestAffinityRouter(RequestRouter):
    """Selects the replicas that a request tries, in the order of `rank`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request tries them, each in a separate
        list.

        The keyword arguments of the call (`RayFleet.take_worker`) contain the request's keys, the
        replicas that have been tried, and the server that stores the response to continue.
        """
        asked: dict[str, Any] = {}
        if pending_request is not None:
            asked = pending_request.kwargs
            # If this is called again, all have been tried, so Ray should wait before the next call.
            pending_request.routing_context.should_backoff = True
        tried = asked.get("tried", ())
        by_name = {
            each.replica_id.unique_id: each
            for each in candidate_replicas
            if each.replica_id.unique_id not in tried
        }
        load = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0
            for name, each in by_name.items()
        }
        ranked = [by_name[name] for name in rank(asked.get("keys", ()), [*by_name], load)]
        if holder := asked.get("holder", ""):
            ranked.sort(key=lambda each: each.replica_metadata.get("instance") != holder)
        return [[each] for each in ranked]


# ---- the router


class RayFleet(Fleet):
    """The servers of Ray's replicas. Ray lists the replicas, and selects one for each request."""

    def __init__(self, engines: DeploymentHandle, metrics: Metrics) -> None:
        super().__init__((), metrics)
        self._engines = engines
        self._names: dict[Backend, str] = {}  # the replicas' IDs

    @asynccontextmanager
    async def take_worker(
        self, bearing: AffinityKey, tried: Container[Backend]
    ) -> AsyncIterator[Backend | None]:
        """Yield a worker, as `Fleet.take_worker` does. Raises Overloaded if all servers are
        full.
        """
        vain = [name for each, name in self._names.items() if each in tried]
        asking = partial(
            self._engines.choose_replica, keys=bearing.keys, holder=bearing.holder, tried=vain
        )
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(PLACE_SECONDS):
                    chosen = await held.enter_async_context(asking())
            except (TimeoutError, RayServeException) as error:
                if not vain:
                    raise Overloaded(
                        f"no server had a free slot within {PLACE_SECONDS:g} s "
                        f"({str(error)[:200] or 'all are busy or starting'}): try again"
                    ) from None
                yield None
                return
            replica = self._known(chosen.replica_metadata)
            with self.count(replica):
                yield replica

    async def watch(self) -> None:
        """Keep updating the list of replicas and their health, until this task is cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:
                log.warning("cannot list the servers from Ray: %s", error)
            await asyncio.sleep(LIST_SECONDS)

    async def look(self) -> None:
        """Update the list of replicas and their health once."""
        asking = self._engines.broadcast("where")
        replies = await asking.results_async(timeout_s=LIST_TIMEOUT, return_exceptions=True)
        found = {self._known(each) for each in replies if isinstance(each, dict)}
        for replica in [each for each in self.replicas if each not in found and not each.load]:
            self.replicas.remove(replica)
            del self._names[replica]
            replica.upstream.drop()
        await super().look()

    def _known(self, reply: dict[str, str]) -> Backend:
        for replica, name in self._names.items():
            if name == reply["name"]:
                return replica
        replica = Backend(reply["url"])
        replica.instance, replica.state, replica.reason = reply["instance"], "ready", ""
        self.replicas.append(replica)
        self._names[replica] = reply["name"]
        log.info("%s is %s", replica.name, reply["name"])
        return replica


class RayIngress:
    """The ASGI application of the ingress: a router to Ray's replicas."""

    def __init__(self, engines: DeploymentHandle, options: SpreadOptions, host: str) -> None:
        forget(*KEY_VARIABLES)  # the servers check them
        metrics = Metrics(ROUTED)
        self._fleet = RayFleet(engines, metrics)
        bodies = Bodies(options.inflight_bytes, metrics, BODY_SECONDS)
        self._app = guarded(Proxy(self._fleet, options, metrics, bodies), host, options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests, and the startup and shutdown of the application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [each for each in message["headers"] if each[0] not in NOT_OURS]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, answer)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        watching = asyncio.create_task(self._fleet.watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for replica in self._fleet.replicas:
            replica.upstream.drop()
        await send({"type": "lifespan.shutdown.complete"})
