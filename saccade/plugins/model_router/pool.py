"""Starts and stops the servers of all models, and queues the requests that wait for them.

    stopped -> starting -> ready -> stopping -> stopped

A server starts when a request waits for its model, and its memory fits the budget. To make space,
idle servers are stopped, the least recently used first. If all servers are busy, the one that has
run longest has to yield. Its running requests finish, new ones wait, and it is started again later.
A server in use is never stopped. Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import httpx

from saccade.core.client import SHARE
from saccade.core.errors import NotFound, Overloaded, StartupError
from saccade.core.metrics import Metric, Metrics
from saccade.plugins.model_router.config import (
    ModelConfig,
    ModelsConfig,
    estimated_bytes,
    in_gib,
)
from saccade.plugins.model_router.process_memory import tree_bytes
from saccade.plugins.route.fleet import Backend, Fleet
from saccade.plugins.route.server_process import OwnedServer

log = logging.getLogger("saccade")

HOST = "127.0.0.1"
START_SECONDS = 1800.0
"""Maximum seconds that a server may take to start, including a download."""
LOOK_SECONDS = 1.0
"""Seconds between checks of idle servers, and of memory while a model waits for it."""
STEADY_SECONDS = 60.0
"""After a server has run for this many seconds, its earlier failures no longer count."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 5.0, 300.0
"""Seconds until a server is restarted after its second consecutive failure, and the maximum. The
delay doubles with each further failure.
"""
DEFAULT_RETRY_SECONDS = 10
MAX_REASON_CHARS = 400
MAX_CLIENTS = 1024
"""Maximum number of clients whose last start is stored, for fairness."""

State = Literal["stopped", "starting", "ready", "stopping"]
STATES: tuple[State, ...] = ("stopped", "starting", "ready", "stopping")
StopReason = Literal["evicted", "idle", "crashed", "failed", "shutdown"]

METRICS = (
    Metric(
        "saccade_route_model_state",
        "gauge",
        "1 for the state that a model's server is in, 0 for the others",
        ("model", "state"),
    ),
    Metric("saccade_route_model_starts_total", "counter", "Starts of a model's server", ("model",)),
    Metric(
        "saccade_route_model_stops_total",
        "counter",
        "Ends of a model's server: evicted for another model, idle, crashed, failed to start, or "
        "shutdown of the router",
        ("model", "reason"),
    ),
    Metric("saccade_route_model_waiting", "gauge", "Requests that wait for a model", ("model",)),
    Metric(
        "saccade_route_model_memory_bytes",
        "gauge",
        "Memory of a model's server when it was last measured, 0 while it is stopped",
        ("model",),
    ),
    Metric(
        "saccade_route_memory_budget_bytes", "gauge", "Memory that all servers together may have"
    ),
    Metric(
        "saccade_route_model_wait_seconds",
        "histogram",
        "Time that requests waited for a server to start",
    ),
)


class ModelUnavailable(Overloaded):
    """The 503 error for a model whose server is not ready. Clients should retry after `retry_after`
    seconds.
    """

    status = 503
    type = "server_error"
    code = "model_loading"

    def __init__(self, message: str, retry_after: float, code: str) -> None:
        super().__init__(message, max(1, round(retry_after)))
        self.param, self.code = "model", code


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A request that waits for a model's server."""

    client: str
    since: float
    granted: asyncio.Future[Fleet]


class ManagedModel:
    """A model, and its server if there is one."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.name = config.name
        self.state: State = "stopped"
        self.server: OwnedServer | None = None
        self.fleet: Fleet | None = None  # a fleet of one worker, while ready
        self.life: asyncio.Task[None] | None = None  # the task of the latest server
        self.leases = 0  # number of requests that use the server
        self.waiting: deque[_Waiter] = deque()
        self.yielding = False  # will be stopped once unused, so new requests wait
        self.stop_reason: StopReason = "idle"
        self.stop_event = asyncio.Event()
        self.started_at = self.ready_at = self.used_at = 0.0
        self.start_seconds = 0.0  # duration of the last start
        self.estimate = estimated_bytes(config.model)  # None: not downloaded yet
        self.resident = 0  # bytes, as last measured
        self.peak = 0  # maximum of `resident`
        self.failures = 0  # consecutive
        self.retry_at = 0.0
        self.reason = ""  # the reason of the last failure

    @property
    def open(self) -> bool:
        """Whether a request may use the server now."""
        return self.state == "ready" and not self.yielding

    def state_fields(self) -> dict[str, Any]:
        """Return the fields that describe this model's state to clients."""
        failed = self.state == "stopped" and self.failures > 0
        return {
            "state": "failed" if failed else self.state,
            **({"reason": self.reason} if failed else {}),
        }


class ModelPool:
    """Manages the servers of all models. The task `run` must be running while requests are
    served.
    """

    def __init__(
        self,
        config: ModelsConfig,
        budget: int,
        metrics: Metrics,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create the pool.

        budget: bytes of memory for all servers.
        options, environment: added to each server's own.
        """
        self.models = [ManagedModel(model) for model in config.models]
        self.budget = budget
        self._config = config
        self._metrics = metrics
        self._options = [*options]
        self._environment = dict(environment or {})
        self._by_name = {name: model for model in self.models for name in model.config.names}
        self._wake = asyncio.Event()
        self._last_start: dict[str, float] = {}  # by client
        self._measured_at = 0.0
        self._closed = False
        metrics.set("saccade_route_memory_budget_bytes", budget)
        for model in self.models:
            self._show(model)

    # ---- requests

    def find(self, name: str) -> ManagedModel:
        """Return the model with this name, or the first model if the name is empty. Raises
        NotFound.
        """
        if not name:
            return self.models[0]
        if name not in self._by_name:
            known = ", ".join(repr(model.name) for model in self.models)
            raise NotFound(
                f"the model {name[:200]!r} does not exist; this router has {known}",
                "model",
                "model_not_found",
            )
        return self._by_name[name]

    def any_ready(self) -> ManagedModel:
        """Return the model that was used last among those with a ready server, or else the first
        model.
        """
        ready = [model for model in self.models if model.open]
        return max(ready, key=lambda model: model.used_at, default=self.models[0])

    @asynccontextmanager
    async def use(self, model: ManagedModel, client: str) -> AsyncIterator[Fleet]:
        """Wait for the model's server, and prevent it from being stopped while the context is open.

        Raises ModelUnavailable, and Overloaded if too many requests wait.
        """
        if model.open:
            assert model.fleet is not None
            model.leases += 1
            fleet = model.fleet
        else:
            fleet = await self._wait(model, client)
        try:
            yield fleet
        finally:
            self._release(model)

    async def _wait(self, model: ManagedModel, client: str) -> Fleet:
        self._check_failed(model)
        self._check_bounds(model, client)
        waiter = _Waiter(client, monotonic(), asyncio.get_running_loop().create_future())
        model.waiting.append(waiter)
        self._show(model)
        self._wake.set()
        granted = waiter.granted
        try:
            async with asyncio.timeout(self._config.patience):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(model)
            if isinstance(error, TimeoutError):
                raise self._impatient(model) from None
            raise
        finally:
            self._metrics.observe("saccade_route_model_wait_seconds", monotonic() - waiter.since)
            with suppress(ValueError):
                model.waiting.remove(waiter)
            self._show(model)

    def _check_failed(self, model: ManagedModel) -> None:
        if self._closed:
            raise ModelUnavailable("the router is stopping", 1, "engine_unavailable")
        if model.retry_at > monotonic() and model.state in ("stopping", "stopped"):
            raise self._failed(model)

    def _check_bounds(self, model: ManagedModel, client: str) -> None:
        waiting = [waiter for each in self.models for waiter in each.waiting]
        mine = sum(waiter.client == client for waiter in waiting)
        config = self._config
        if len(model.waiting) >= config.queue:
            raise Overloaded(
                f"{len(model.waiting)} requests are waiting for the model {model.name!r}; the "
                f"limit is {config.queue} (queue): try again"
            )
        if len(waiting) >= config.max_waiting:
            raise Overloaded(
                f"{len(waiting)} requests are waiting for models; the limit is "
                f"{config.max_waiting} (max-waiting): try again"
            )
        if mine >= max(1, config.max_waiting * SHARE):
            raise Overloaded(
                f"{mine} of your requests are waiting for models; the limit per client is half of "
                f"max-waiting ({config.max_waiting}): try again"
            )

    def _release(self, model: ManagedModel) -> None:
        model.leases -= 1
        model.used_at = monotonic()
        if model.yielding:
            self._wake.set()

    def _impatient(self, model: ManagedModel) -> ModelUnavailable:
        patience = f"{self._config.patience:g} s (patience)"
        if model.state == "starting":
            elapsed = monotonic() - model.started_at
            remaining = model.start_seconds - elapsed
            retry = remaining if remaining > 0 else DEFAULT_RETRY_SECONDS
            return ModelUnavailable(
                f"the model {model.name!r} is still loading after {patience}: try again",
                retry,
                "model_loading",
            )
        others = [each for each in self.models if each is not model and each.state != "stopped"]
        used = ", ".join(f"{each.name!r} {in_gib(self._size(each))}" for each in others)
        return ModelUnavailable(
            f"the model {model.name!r} needs {in_gib(self.need(model))}; all models may have "
            f"{in_gib(self.budget)} (memory), of which others use: {used or 'none'}. None stopped "
            f"within {patience}: try again, or raise the router's memory",
            DEFAULT_RETRY_SECONDS,
            "insufficient_memory",
        )

    def _failed(self, model: ManagedModel) -> ModelUnavailable:
        times = f"{model.failures} times in a row" if model.failures > 1 else "once"
        return ModelUnavailable(
            f"the server of the model {model.name!r} failed {times}: {model.reason}",
            model.retry_at - monotonic(),
            "model_failed",
        )

    # ---- memory

    def need(self, model: ManagedModel) -> int:
        """Return the bytes that the model's server needs: as declared, as measured, or by the size
        of its files.

        Returns the whole budget if none of these is known, because the model is not downloaded yet.
        """
        known = max(model.config.memory or 0, model.peak)
        if known:
            return known
        return self.budget if model.estimate is None else model.estimate

    def _size(self, model: ManagedModel) -> int:
        if model.state == "stopped":
            return 0
        if model.state == "starting":
            return self.need(model)
        return max(model.resident, model.config.memory or 0)

    async def _measure(self, models: Sequence[ManagedModel]) -> None:
        for model in models:
            if model.server is not None:
                model.resident = await asyncio.to_thread(tree_bytes, model.server.pid)
                model.peak = max(model.peak, model.resident)
                self._show(model)

    # ---- starting and stopping

    async def run(self) -> None:
        """Start and stop servers, until this task is cancelled."""
        while True:
            self._wake.clear()
            try:
                delay = await self._step()
            except Exception:  # requests keep waiting for the next step
                log.exception("the models could not be managed")
                delay = LOOK_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    async def _step(self) -> float:
        """Start or stop servers as needed. Returns the seconds until the next step."""
        wanted = [model for model in self.models if model.waiting and model.state == "stopped"]
        if not wanted:
            self._end_yielding()
            await self._stop_idle()
            return LOOK_SECONDS
        target = min(wanted, key=self._turn)
        if target.retry_at > monotonic():  # it has failed while these requests were waiting
            self._reject(target, self._failed(target))
            return 0
        need = self.need(target)
        if need > self.budget:
            self._reject(target, self._too_large(target, need))
            return 0
        ready = [model for model in self.models if model.state == "ready"]
        if ready and monotonic() - self._measured_at > LOOK_SECONDS:
            await self._measure(ready)
            self._measured_at = monotonic()
        if not target.waiting:  # all clients have left meanwhile
            return 0
        if need <= self._free():
            self._start(target)
            return 0
        self._choose_victims(need)
        await self._stop_unused()
        return LOOK_SECONDS

    def _turn(self, model: ManagedModel) -> tuple[float, float]:
        """Return the key by which waiting models are sorted: the time of the last start for any of
        the waiting clients, then the time of arrival.
        """
        last = min(self._last_start.get(waiter.client, 0.0) for waiter in model.waiting)
        return last, model.waiting[0].since

    def _free(self, *, soon: bool = False) -> int:
        """Return the bytes of the budget that are free.

        soon: count the memory of servers that are about to stop as free.
        """
        leaving = ("stopping",) if soon else ()
        used = sum(
            self._size(model)
            for model in self.models
            if model.state not in leaving and not (soon and model.yielding)
        )
        return self.budget - used

    def _choose_victims(self, need: int) -> None:
        """Select servers to stop until `need` bytes will be free, or until no other server may be
        stopped yet.
        """
        now = monotonic()
        while self._free(soon=True) < need:
            candidates = [model for model in self.models if model.open]
            idle = [model for model in candidates if not model.leases]
            due = [model for model in candidates if self._due(model) <= now]
            idle_due = [model for model in due if not model.leases]
            if idle_due:
                victim = min(idle_due, key=lambda model: model.used_at)
            elif due and not idle:
                victim = min(due, key=lambda model: model.ready_at)
            else:  # wait until an idle server may be evicted, rather than stop a busy one
                return
            victim.yielding, victim.stop_reason = True, "evicted"

    def _due(self, model: ManagedModel) -> float:
        """Return the time from which a server may be stopped. A busy server may run for at least as
        long as its start took.
        """
        stay = max(self._config.stay, model.start_seconds if model.leases else 0.0)
        return model.ready_at + stay

    def _end_yielding(self) -> None:
        for model in self.models:
            if model.yielding and model.state == "ready":
                model.yielding = False
                self._admit(model)

    async def _stop_idle(self) -> None:
        if self._config.idle is None:
            return
        before = monotonic() - self._config.idle
        for model in self.models:
            if model.open and not model.leases and max(model.used_at, model.ready_at) < before:
                model.yielding, model.stop_reason = True, "idle"
        await self._stop_unused()

    async def _stop_unused(self) -> None:
        for model in self.models:
            if model.yielding and model.state == "ready" and not model.leases:
                if await self._has_work(model):
                    continue
                if model.yielding and model.state == "ready" and not model.leases:
                    model.state = "stopping"
                    self._show(model)
                    model.stop_event.set()

    async def _has_work(self, model: ManagedModel) -> bool:
        """Return True if the server works without a request in flight, e.g. on a background
        response.
        """
        assert model.server is not None
        with suppress(httpx.HTTPError):
            stats = await model.server.stats()
            return stats["running"] + stats["waiting"] > 0
        return False

    def _too_large(self, model: ManagedModel, need: int) -> ModelUnavailable:
        return ModelUnavailable(
            f"the model {model.name!r} needs {in_gib(need)}; all models together may have "
            f"{in_gib(self.budget)}: raise `memory` in the router's file, or make the model "
            "smaller, as by --quantization or --context-length",
            60,
            "insufficient_memory",
        )

    # ---- the lifecycle of a server

    def _start(self, model: ManagedModel) -> None:
        now = monotonic()
        for waiter in model.waiting:
            self._last_start.pop(waiter.client, None)
            self._last_start[waiter.client] = now
        while len(self._last_start) > MAX_CLIENTS:
            del self._last_start[next(iter(self._last_start))]
        model.state, model.started_at = "starting", now
        model.stop_event.clear()
        self._metrics.inc("saccade_route_model_starts_total", model=model.name)
        self._show(model)
        log.info("starting the model %s", model.name)
        model.life = asyncio.create_task(self._live(model))

    async def _live(self, model: ManagedModel) -> None:
        reason: StopReason = "shutdown"
        try:
            model.server = self._start_server(model)
            async with asyncio.timeout(START_SECONDS):
                url = await model.server.serving()
            model.fleet = Fleet([Backend(url, model.name)], self._metrics)
            await model.fleet.look()
            self._open(model)
            await self._measure([model])
            watching = asyncio.create_task(model.fleet.watch())
            try:
                crashed = await self._until_end(model)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            reason = "crashed" if crashed else model.stop_reason
            if crashed:
                status = model.server.ended.result()
                why = f"the server exited with status {status}"
                self._note_failure(model, _last_error(model.server, why))
        except Exception as error:  # fail the waiting requests, or it would be restarted forever
            reason = "failed"
            if isinstance(error, StartupError):
                why = _last_error(model.server, str(error).strip().rpartition("\n")[2])
            elif isinstance(error, TimeoutError):
                why = f"the start took more than {START_SECONDS:g} s"
            else:
                why = repr(error)
            self._note_failure(model, why)
            self._reject(model, self._failed(model))
        finally:
            await self._end(model, reason)

    def _start_server(self, model: ManagedModel) -> OwnedServer:
        options = [*self._options, *model.config.serve_options]
        label = f"[{model.name}] "
        return OwnedServer(model.config.model, options, HOST, self._environment, label)

    def _open(self, model: ManagedModel) -> None:
        model.ready_at = monotonic()
        model.start_seconds = model.ready_at - model.started_at
        model.resident = self.need(model)  # until it has been measured
        model.state, model.yielding = "ready", False
        self._admit(model)

    def _admit(self, model: ManagedModel) -> None:
        assert model.fleet is not None
        for waiter in model.waiting:
            if not waiter.granted.done():
                model.leases += 1
                waiter.granted.set_result(model.fleet)
        model.waiting.clear()
        self._show(model)

    async def _until_end(self, model: ManagedModel) -> bool:
        """Wait until the server should be stopped or has exited. Returns True if it has exited."""
        assert model.server is not None
        ended = asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(model.server.ended)))
        told = asyncio.create_task(model.stop_event.wait())
        try:
            await asyncio.wait((ended, told), return_when=asyncio.FIRST_COMPLETED)
            return ended.done() and not told.done()
        finally:
            told.cancel()
            ended.cancel()

    async def _end(self, model: ManagedModel, reason: StopReason) -> None:
        model.state = "stopping"
        self._show(model)
        if model.fleet is not None:
            if reason in ("evicted", "idle"):
                await self._measure([model])
            for replica in model.fleet.replicas:
                replica.upstream.drop()
        if model.server is not None:
            await model.server.stop()
        self._metrics.inc("saccade_route_model_stops_total", model=model.name, reason=reason)
        log.info("the model %s has stopped (%s)", model.name, reason)
        model.server, model.fleet, model.resident = None, None, 0
        if reason in ("evicted", "idle"):
            model.failures = 0
        model.state, model.yielding = "stopped", False
        self._show(model)
        self._wake.set()

    def _note_failure(self, model: ManagedModel, reason: str) -> None:
        now = monotonic()
        steady = model.state == "ready" and now - model.ready_at > STEADY_SECONDS
        model.failures = 1 if steady else model.failures + 1
        doubled = BACKOFF_SECONDS * 2 ** min(model.failures - 2, 10)
        wait = min(MAX_BACKOFF_SECONDS, doubled) if model.failures > 1 else 0.0
        model.retry_at, model.reason = now + wait, reason
        log.error("the server of the model %s has failed: %s", model.name, reason)

    def _reject(self, model: ManagedModel, error: ModelUnavailable) -> None:
        for waiter in model.waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        model.waiting.clear()

    # ---- shutdown and metrics

    def begin_stop(self) -> None:
        """Reject all waiting requests, and from now on all requests that would have to wait."""
        self._closed = True
        for model in self.models:
            self._reject(model, ModelUnavailable("the router is stopping", 1, "engine_unavailable"))

    async def stop(self) -> None:
        """Stop all servers, and wait until they have exited."""
        for model in self.models:
            model.stop_reason = "shutdown"
            model.stop_event.set()
            if model.life is not None and model.state == "starting":
                model.life.cancel()
        lives = [model.life for model in self.models if model.life is not None]
        await asyncio.gather(*lives, return_exceptions=True)

    def _show(self, model: ManagedModel) -> None:
        name, inc = model.name, self._metrics.set
        for state in STATES:
            inc("saccade_route_model_state", int(model.state == state), model=name, state=state)
        inc("saccade_route_model_waiting", len(model.waiting), model=name)
        inc("saccade_route_model_memory_bytes", self._size(model), model=name)


def _last_error(server: OwnedServer | None, why: str) -> str:
    """Return the last error that a server has printed, or `why` if there is none."""
    lines = [] if server is None else server.last_lines
    errors = [line for line in lines if line.startswith(("error:", "ERROR "))]
    return (errors or [why])[-1][:MAX_REASON_CHARS]
