"""Ranks in threads of one process: each holds its own slice of a checkpoint, and they meet through
the real collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.plan import Plan, StepResult
from saccade.engine.engine import Workers
from saccade.families.registry import load_spec
from saccade.parallel import Distributed, Shard, SharedMemory, meeting_place
from saccade.runtime.weights import load_net
from saccade.runtime.worker import Worker

T = TypeVar("T")


def shards(size: int, backend: Literal["shm", "gloo"] = "shm") -> list[Shard]:
    """One per rank. Their collectives must be called from different threads."""
    if backend == "shm":
        fd = meeting_place()
        return [Shard(rank, size, SharedMemory(rank, size, fd)) for rank in range(size)]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def meet(rank: int) -> Shard:
        return Shard(
            rank, size, Distributed(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))
        )

    return together(meet, range(size))


def together(work: Callable[..., T], *arguments: Sequence[object]) -> list[T]:
    """`work` on every rank's arguments, side by side; what each returned."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))


class ThreadCrew:
    """`size` ranks on the checkpoint in `folder`, float32."""

    def __init__(
        self, folder: Path, size: int, encoder: EncoderMode, backend: Literal["shm", "gloo"] = "shm"
    ) -> None:
        spec, device = load_spec(folder), torch.device("cpu")
        self.encoder = encoder
        self.shards = shards(size, backend)
        self.nets = [
            load_net(
                spec,
                folder,
                dtype=torch.float32,
                device=device,
                shard=shard,
                encoder=encoder,
                progress=False,
            )
            for shard in self.shards
        ]

    def hire(self, config: EngineConfig, arena: Arena) -> Workers:
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
        assert all(
            (other.tokens, other.logprobs) == (first.tokens, first.logprobs) for other in results
        ), "ranks drew different tokens"
        return first
