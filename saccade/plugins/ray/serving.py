"""Saccade on Ray Serve: `serve run saccade.plugins.ray.serving:app model=MODEL`, or the file that
`saccade deploy ray` writes.

Two deployments. `engine`: each replica owns a real `saccade serve` process (`server_process.py`). A
third, `encoder`, may own servers with role encode, named to the other servers by their owners.
`ingress`: the router of `saccade route` (`proxy.py`), except for the choice of replica. Ray knows
the replicas, and picks one by `DigestAffinityRouter`, which ranks by `rank.py`. Ray holds a place
at the replica during the request. The request itself goes from the ingress to the server by HTTP,
so that streams, aborts, files, errors and retries are those of `saccade route`.

The only module that imports Ray (the extra `ray`), and imported by Ray alone.
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
"""A request waits so long for a place at a server."""
LIST_SECONDS = 1.0
"""Between two looks at which replicas there are."""
LIST_TIMEOUT = 5.0
BODY_SECONDS = 300.0
NOT_OURS = frozenset((b"x-request-id", b"date", b"server"))
"""Headers of an answer that Ray's own HTTP server writes."""


class AppArgs(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of `app`.

    options: those of `saccade serve`, as a list or as a line. encoders: True if the encoder
    deployment encodes images. host: the address on which Ray Serve listens (its `http_options`).
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
    """Build the application. Raises msgspec.ValidationError, ConfigError."""
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
        """Make the ingress in its own process."""
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
    """A replica: the owner of one server. Ray's questions to it are passed to the server."""

    def __init__(
        self, model: str, options: Sequence[str], encoders: DeploymentHandle | None = None
    ) -> None:
        """Start the server, and return once it serves. Raises StartupError.

        encoders: the deployment that encodes its images. With `None` the server does so itself.
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
        forget(*KEY_VARIABLES)  # the server has them
        self._url = self._server.ready()
        self._server.ended.add_done_callback(self._follow)

    def _follow(self, ended: Future[int]) -> None:
        """End the replica at once after its server's death. Ray starts another."""
        if not self._ending:
            log.error("the server exited with %s; its replica stops", ended.result())
            os._exit(1)

    async def where(self) -> dict[str, str]:
        """Return the replica's name for Ray, its server's URL, and the server run's name."""
        name = serve.get_replica_context().replica_id.unique_id
        return {"name": name, "url": self._url, "instance": await self._server.health()}

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return the replica's facts for routers, constant from its start."""
        return await self.where()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the replica's facts for routers. Ray asks every few seconds."""
        return await self._server.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures for `by_queue`."""
        stats = await self._server.stats()
        return {REQUESTS: stats["running"] + stats["waiting"]}

    async def check_health(self) -> None:
        """Check the server's health. Raises RuntimeError.

        Ray also asks before the first request.
        """
        await self._server.health()
        await self._tell()

    async def _tell(self) -> None:
        """Send the encoders' addresses to the server, at every health check by Ray."""
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
        """End the server. Ray has let its requests finish."""
        self._ending = True
        await self._server.stop()
        self._folder.cleanup()


def by_queue(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the wanted number of servers.

    There is one server per `target_ongoing_requests` requests that run, wait at servers, or wait
    for one.
    """
    requests = (context.aggregated_metrics or {}).get(REQUESTS, {})
    if not requests:
        return context.target_num_replicas, {}
    waiting = sum(requests.values()) + (context.total_queued_requests or 0)
    return waiting / context.config.get_target_ongoing_requests(), {}


class DigestAffinityRouter(RequestRouter):
    """Chooses the replicas that a request should try, in the order of `rank`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order of trying, each alone.

        The request's keys, the replicas tried in vain, and the instance that keeps the response to
        continue come as keyword arguments of the call (`RayFleet.take_worker`).
        """
        asked: dict[str, Any] = {}
        if pending_request is not None:
            asked = pending_request.kwargs
            # All have been tried by then: wait before the next round.
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


# ---- the router in front of them


class RayFleet(Fleet):
    """The servers of Ray's replicas. Ray lists the replicas, and picks one for each request."""

    def __init__(self, engines: DeploymentHandle, metrics: Metrics) -> None:
        super().__init__((), metrics)
        self._engines = engines
        self._names: dict[Backend, str] = {}  # Ray's

    @asynccontextmanager
    async def take_worker(
        self, bearing: AffinityKey, tried: Container[Backend]
    ) -> AsyncIterator[Backend | None]:
        """Yield a worker as Fleet does. Raises Overloaded if all servers are full."""
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
                        f"no server had a place within {PLACE_SECONDS:g} s "
                        f"({str(error)[:200] or 'all are busy or starting'}): try again"
                    ) from None
                yield None
                return
            replica = self._known(chosen.replica_metadata)
            with self.count(replica):
                yield replica

    async def watch(self) -> None:
        """Follow the list of replicas and their health, for ever."""
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
    """The ingress's ASGI application: a router in front of Ray's replicas."""

    def __init__(self, engines: DeploymentHandle, options: SpreadOptions, host: str) -> None:
        forget(*KEY_VARIABLES)  # they are the servers' to check
        metrics = Metrics(ROUTED)
        self._fleet = RayFleet(engines, metrics)
        bodies = Bodies(options.inflight_bytes, metrics, BODY_SECONDS)
        self._app = guarded(Proxy(self._fleet, options, metrics, bodies), host, options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve HTTP, and the beginning and the end of the application."""
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
