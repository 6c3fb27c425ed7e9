"""The engine's two halves in one process, without a front: the real scheduler plans, the real
worker computes, two plans in flight as in a server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.gpu_check.model import RandomModel
from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig
from saccade.core.errors import InvalidRequest
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.types import Request, SamplingParams
from saccade.engine.process import build_scheduler
from saccade.engine.sizing import resolve
from saccade.runtime.process import measure_hardware
from saccade.runtime.step import Step
from saccade.runtime.streams import put_first
from saccade.runtime.worker import Worker

PLANS = 2
"""In flight."""


@dataclass
class Progress:
    """When which tokens came: seconds on the clock, by request and by step."""

    first: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)


class EngineHere:
    """One model, configured as a server would be."""

    def __init__(
        self,
        model: RandomModel,
        device: str,
        dtype: Dtype,
        *,
        options: EngineOptions | None = None,
    ) -> None:
        if device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # as a server does
        hardware = measure_hardware("cuda" if device == "cuda" else "cpu")
        chosen = replace(
            options or EngineOptions(), disable_radix_cache=True, embedding_cache_host_mb=0
        )
        self.config: EngineConfig = resolve(ModelOptions(), chosen, model.spec, dtype, hardware)
        put_first(torch.device(self.config.device))
        arena = Arena.create(16 << 20)
        self.worker = Worker(model.net, self.config, arena)
        self.scheduler = build_scheduler(self.config, model.spec, (), arena.size, 0.5)
        self._generator = torch.Generator().manual_seed(0)
        self._number = 0

    def request(self, length: int, answer: int) -> Request:
        """A prompt of random tokens that nobody has sent before."""
        self._number += 1
        tokens = torch.randint(5, 250, (length,), generator=self._generator).tolist()
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        return Request(f"{self._number}", tuple(tokens), (), (), sampling)

    def run(
        self, requests: Sequence[Request], watch: Callable[[Sequence[str]], None] | None = None
    ) -> Progress:
        """All of them side by side to their ends. watch: told after each step who drew a token."""
        progress = Progress()
        for request in requests:
            for delta in self.scheduler.add(request):
                raise InvalidRequest(delta.error or "the request was refused")
        begun: deque[Step] = deque()
        while not self.scheduler.idle or begun:
            while len(begun) < PLANS and not (plan := self.scheduler.plan()).empty:
                begun.append(self.worker.begin(plan))
            if not begun:
                continue
            deltas = self.scheduler.apply(begun.popleft().result())
            now = time.perf_counter()
            progress.steps.append((now, sum(len(delta.tokens) for delta in deltas)))
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                if delta.tokens:
                    progress.first.setdefault(delta.id, now)
            if watch is not None:
                watch([delta.id for delta in deltas if delta.tokens])
        return progress
