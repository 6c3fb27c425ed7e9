"""Servers of models in this process, in place of `saccade serve`: they say which model they are."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from saccade.core.errors import StartupError
from saccade.core.metrics import ROUTED, Metrics
from saccade.plugins.model_router import pool as pools
from saccade.plugins.model_router.config import ModelConfig, ModelsConfig
from saccade.plugins.model_router.pool import METRICS, ModelPool

MIB = 1 << 20
INSTANCE = "0badcafe"


@dataclass
class World:
    """What all fake servers have in common, and what they have done."""

    resident: dict[str, int] = field(default_factory=dict)  # bytes by model, or `DEFAULT`
    failing: set[str] = field(default_factory=set)  # models whose servers fail to start
    working: set[str] = field(default_factory=set)  # models with work that no request waits for
    starting: asyncio.Event = field(default_factory=asyncio.Event)  # starts wait for it
    started: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)  # of starts
    servers: dict[int, FakeServer] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def live(self) -> list[str]:
        return [server.model for server in self.servers.values() if not server.ended.done()]


class FakeServer:
    """As `OwnedServer`. Requests get the model's name and what they have asked."""

    _pids = itertools.count(1)

    def __init__(
        self,
        world: World,
        model: str,
        options: Sequence[str],
        host: str,
        environment: Mapping[str, str],
        label: str,
    ) -> None:
        self.world, self.model, self.host = world, model, host
        self.pid = next(self._pids)
        self.last_lines: list[str] = []
        self.ended: Future[int] = Future()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        world.started[model] += 1
        world.order.append(model)
        world.servers[self.pid] = self
        world.options[model] = [*options]
        world.environment = environment

    async def serving(self) -> str:
        await self.world.starting.wait()
        if self.model in self.world.failing:
            self.last_lines = ["loading", "error: the checkpoint is damaged", ""]
            self.ended.set_result(1)
            raise StartupError("the server exited with 1")
        self._listener = await asyncio.start_server(self._answer, self.host, 0)
        return f"http://{self.host}:{self._listener.sockets[0].getsockname()[1]}"

    async def stats(self) -> dict[str, float]:
        return {"running": float(self.model in self.world.working), "waiting": 0.0}

    async def stop(self) -> None:
        self.crash(0)
        self.world.stopped[self.model] += 1
        await asyncio.sleep(0)

    def crash(self, status: int = -9) -> None:
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()
        if not self.ended.done():
            self.ended.set_result(status)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with _closed(writer):
            while head := await _head(reader):
                length = int(dict(head[1:]).get("content-length", "0"))
                body = (await reader.readexactly(length)).decode()
                await asyncio.sleep(0.001)
                content = json.dumps({"model": self.model, "path": head[0][0], "body": body})
                name = f"x-saccade-instance: {INSTANCE}\r\n"
                top = f"HTTP/1.1 200 OK\r\n{name}content-length: {len(content)}\r\n\r\n"
                writer.write((top + content).encode())


@contextmanager
def _closed(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> list[tuple[str, str]]:
    """The path, and the headers."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode().strip().split("\r\n")
    headers = [line.partition(":") for line in lines]
    return [(first.split()[1], ""), *((name.lower(), value.strip()) for name, _, value in headers)]


@contextmanager
def faked() -> Iterator[World]:
    """Let pools start fake servers of a MiB each."""
    world = World()
    world.starting.set()

    def start(*args: Any) -> FakeServer:
        return FakeServer(world, *args)

    def resident(pid: int) -> int:
        return world.resident.get(world.servers[pid].model, MIB)

    with (
        patch.object(pools, "OwnedServer", start),
        patch.object(pools, "tree_bytes", resident),
        patch.object(pools, "estimated_bytes", lambda _: MIB),
        patch.object(pools, "LOOK_SECONDS", 0.01),
    ):
        yield world


@asynccontextmanager
async def pooled(
    *names: str, budget: int = 1, memory: Mapping[str, int] | None = None, **options: Any
) -> AsyncIterator[tuple[ModelPool, World, Metrics]]:
    """A running pool of models, with room for `budget` of them."""
    declared = memory or {}
    models = tuple(ModelConfig(name, name, memory=declared.get(name)) for name in names)
    metrics = Metrics([*ROUTED, *METRICS])
    with faked() as world:
        config = ModelsConfig(models, **{"stay": 0.0, "patience": 20.0, **options})
        pool = ModelPool(config, budget * MIB, metrics)
        running = asyncio.create_task(pool.run())
        try:
            yield pool, world, metrics
        finally:
            world.starting.set()
            running.cancel()
            pool.begin_stop()
            await pool.stop()
    assert not world.live(), "a server has outlived its pool"
