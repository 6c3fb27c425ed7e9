"""Ranks for tests, each with its own slice of a checkpoint, that meet through the real collectives:
in threads of one process, or in the real processes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
import torch.distributed as dist

from saccade.core.arena import Arena
from saccade.core.child import HEARTBEAT_SECONDS
from saccade.core.config import (
    AllReduce,
    EncoderMode,
    EngineConfig,
    Hardware,
    ParallelConfig,
    QuantizationMode,
)
from saccade.core.messages import Load
from saccade.core.metrics import Metrics
from saccade.core.plan import Plan, StepResult
from saccade.engine.workers import Workers, WorkersLost
from saccade.families.registry import load_spec
from saccade.parallel import Distributed, Shard, SharedMemory
from saccade.runtime.weights import load_net
from saccade.runtime.worker import Worker

T = TypeVar("T")


def shards(size: int, backend: Literal["shm", "gloo"] = "shm") -> list[Shard]:
    """One per rank. Their collectives must be called from different threads."""
    if backend == "shm":
        fd = os.memfd_create("ranks")
        return [Shard(rank, size, SharedMemory(rank, size, fd)) for rank in range(size)]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def meet(rank: int) -> Shard:
        group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        return Shard(rank, size, Distributed(group))

    return together(meet, range(size))


def together(work: Callable[..., T], *arguments: Sequence[object]) -> list[T]:
    """`work` on every rank's arguments, side by side; what each returned."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))


class ThreadCrew:
    """Ranks on the checkpoint in `folder`, float32: `size` slices, and experts divided into
    `expert_runs`, if these are more as many ranks.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        encoder: EncoderMode,
        backend: Literal["shm", "gloo"] = "shm",
        quantization: QuantizationMode = "auto",
        expert_runs: int = 1,
    ) -> None:
        spec, device = load_spec(folder), torch.device("cpu")
        self.encoder = encoder
        self.shards = [
            shard.spread(size, expert_runs) for shard in shards(max(size, expert_runs), backend)
        ]
        self.nets = [
            load_net(
                spec,
                folder,
                dtype=torch.float32,
                device=device,
                shard=shard,
                encoder=encoder,
                quantization=quantization,
            )
            for shard in self.shards
        ]

    def hire(self, config: EngineConfig, arena: Arena) -> ThreadWorkers:
        # Side by side, as in processes of their own: where they encode to begin with, they have
        # sums to make together.
        return ThreadWorkers(
            together(
                lambda net, shard: Worker(net, config, arena, shard, self.encoder),
                self.nets,
                self.shards,
            )
        )


class ThreadWorkers:
    """Executes each plan on every rank; whatever they draw must be the same."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    def execute(self, plan: Plan) -> StepResult:
        results = together(lambda worker: worker.execute(plan), self.workers)
        first = results[0]
        assert all(other.tokens == first.tokens for other in results), (
            "ranks go on from different tokens"
        )
        return first


class ProcessCrew:
    """`size` real worker processes, for who calls them step by step; nothing is left of them
    afterwards. Start, `load`, `hire`, `execute`.
    """

    def __init__(self, size: int, arena: Arena) -> None:
        self.metrics = Metrics()
        self.overdue = ""
        self._size = size
        self._loop = asyncio.new_event_loop()
        # The processes live as long as the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._arrived = asyncio.Event()
        self._workers = Workers(size, self._arrived, self.metrics)
        self._beating = self._loop.create_task(self._beat())
        self._thread.start()
        before = psutil.Process().children()
        self._call(self._workers.start(arena.fd, arena.size))
        self.processes = [child for child in psutil.Process().children() if child not in before]

    def load(
        self,
        folder: Path,
        encoder: EncoderMode = "data",
        backend: AllReduce = "shm",
        threads: int = 1,
        step_timeout: float = 60.0,
    ) -> list[Hardware]:
        """In float32. Raises WorkersLost, as do `hire` and `execute`."""
        parallel = ParallelConfig(self._size, encoder, backend, step_timeout)
        load = Load(str(folder), "cpu", "float32", "auto", threads, parallel)
        return [loaded.hardware for loaded in self._call(self._workers.load(load))]

    def hire(self, config: EngineConfig, arena: Arena) -> ProcessCrew:
        self._call(self._workers.begin(config))
        return self

    def execute(self, plan: Plan) -> StepResult:
        return self._call(self._execute(plan))

    async def _execute(self, plan: Plan) -> StepResult:
        self._workers.send(plan)
        while True:
            self._arrived.clear()
            if answered := self._workers.take():
                return answered[0][1]
            if self._workers.in_trouble:
                raise WorkersLost(await self._workers.explain())
            await self._arrived.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._workers.tick()
            self.overdue = self._workers.overdue or self.overdue
            self._arrived.set()

    async def _end(self) -> None:
        await self._workers.close()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    def _call(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(90)

    def __enter__(self) -> ProcessCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
