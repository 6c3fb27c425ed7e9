"""Serves routes of plugins. Their modules are imported at the first request to one of their
paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Protocol

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from saccade.api.handlers import RequestHandler
from saccade.core.options import ServeOptions
from saccade.plugin import Plugin

log = logging.getLogger("saccade")

RESUME_SECONDS = 2.0
"""Interval between checks whether a plugin has pending background work."""


class Service(Protocol):
    """Background work of a plugin, such as running batches."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Services:
    """Starts the background work of all plugins once the model is loaded, and stops it with the
    server.
    """

    def __init__(self) -> None:
        self._services: list[Service] = []
        self._started = False

    def add(self, service: Service) -> None:
        """Add a service, and start it now if the model is already loaded."""
        self._services.append(service)
        if self._started:
            service.start()

    def start(self) -> None:
        self._started = True
        for service in self._services:
            service.start()

    async def stop(self) -> None:
        self._started = False
        for service in self._services:
            await service.stop()


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The arguments from which a plugin's routes are constructed."""

    handler: RequestHandler
    options: ServeOptions
    plugins: tuple[Plugin, ...]  # the enabled ones
    instance: str  # identifies this server process, in headers and in ids of stored responses
    started: int  # seconds since the epoch
    app: Starlette  # the routes without middleware, to run the requests of batches
    services: Services = field(default_factory=Services)


class MountedPlugin:
    """An ASGI application that imports a plugin's routes when it is first called."""

    def __init__(self, plugin: Plugin, api: ApiContext) -> None:
        self.plugin = plugin
        self._api = api
        self.loaded: list[BaseRoute] = []
        self._loading: asyncio.Task[Router] | None = None

    @property
    def routes(self) -> Iterator[BaseRoute]:
        for path in self.plugin.http.paths:
            yield Route(path, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self.load())(scope, receive, send)

    async def load(self) -> Router:
        """Import the plugin's routes in a thread and return them. Later calls return the same
        router.
        """
        if self._loading is None or (self._loading.done() and self._loading.exception()):
            self._loading = asyncio.create_task(self._load())
        return await asyncio.shield(self._loading)

    async def resume(self) -> None:
        """Import the plugin if it has pending background work. Its check for such work runs in a
        thread.
        """
        if self._loading is None and self.plugin.http.waiting:
            waiting: Callable[[ApiContext], bool] = resolve_name(self.plugin.http.waiting)
            if await asyncio.to_thread(waiting, self._api):
                await self.load()

    async def _load(self) -> Router:
        assert self.plugin.http.routes is not None
        build: Callable[[ApiContext], Sequence[BaseRoute]] = await asyncio.to_thread(
            resolve_name, self.plugin.http.routes
        )
        self.loaded = list(build(self._api))
        return Router(self.loaded, redirect_slashes=False)


class Resumption:
    """A service that imports plugins once they have pending background work."""

    def __init__(self, plugins: Sequence[MountedPlugin]) -> None:
        self._plugins = [each for each in plugins if each.plugin.http.waiting]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for plugin in self._plugins:
                try:
                    await plugin.resume()
                except Exception:  # checked again at the next interval
                    log.exception("cannot load the plugin %s", plugin.plugin.name)
            await asyncio.sleep(RESUME_SECONDS)


def methods_of(routes: Sequence[BaseRoute], path: str) -> set[str]:
    """Return the HTTP methods that a path allows, including those of plugins imported so far."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            inner = route.endpoint
            found |= methods_of(inner.loaded, path) if isinstance(inner, MountedPlugin) else set()
            found |= route.methods or set()
    return found


def mount(plugins: Sequence[Plugin], api: ApiContext) -> list[MountedPlugin]:
    """Return a `MountedPlugin` for each plugin that has routes."""
    return [MountedPlugin(plugin, api) for plugin in plugins if plugin.http.routes]
