"""The engine's two halves in one process, without a front: the real scheduler plans, the real
worker computes, two plans in flight as in a server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig, PageTierConfig
from saccade.core.errors import InvalidRequest
from saccade.core.options import CacheOptions, EngineOptions, ModelOptions
from saccade.core.plan import PLANS_IN_FLIGHT, Plan
from saccade.core.types import Delta, Image, ImageKey, Request, SamplingParams
from saccade.engine.process import build_scheduler
from saccade.engine.sizing import resolve
from saccade.runtime.begun_step import Step
from saccade.runtime.process import measure_hardware
from saccade.runtime.streams import put_first
from saccade.runtime.worker import Worker
from saccade_bench.gpu_check.model import RandomModel
from saccade_bench.lab.qwen import qwen

ARENA_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Tick:
    """The end of a step: when, in seconds on the clock, and how many tokens were drawn. prompt:
    tokens of prompts were computed. encoding: an image was being encoded.
    """

    at: float
    drawn: int
    prompt: bool
    encoding: bool


@dataclass
class Progress:
    """When which tokens came: seconds on the clock, by request and by step. news: all that was told
    of requests, in order. encode_ms: of each image.
    """

    first: dict[str, float] = field(default_factory=dict)
    steps: list[Tick] = field(default_factory=list)
    news: list[Delta] = field(default_factory=list)
    encode_ms: list[float] = field(default_factory=list)


class EngineHere:
    """One model, configured as a server would be."""

    def __init__(
        self,
        model: RandomModel,
        device: str,
        dtype: Dtype,
        *,
        options: EngineOptions | None = None,
        tower_budget: int | None = None,
        pages: PageTierConfig | None = None,
    ) -> None:
        """tower_budget: None: as a server has it, which adapts it; else it stays. pages: where KV
        goes that leaves the device; None: no prefix is cached.
        """
        if device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # as a server does
        hardware = measure_hardware("cuda" if device == "cuda" else "cpu")
        caches = CacheOptions(disable_radix_cache=pages is None, embedding_cache_host_mb=0)
        engine = options or EngineOptions()
        config = resolve(ModelOptions(), engine, model.spec, dtype, hardware, caches=caches)
        if tower_budget is not None:
            config = replace(config, tower_budget=tower_budget)
        if pages is not None:
            config = replace(config, kv=replace(config.kv, pages=pages))
        self.config: EngineConfig = config
        put_first(torch.device(config.device))
        self._spec = model.spec
        self._arena = Arena.create(ARENA_BYTES)
        self._pixels: dict[ImageKey, torch.Tensor] = {}
        self.worker = Worker(model.net, config, self._arena)
        paced = tower_budget is None
        self.scheduler = build_scheduler(config, model.spec, (), self._arena.size, 0.5, paced=paced)
        self._generator = torch.Generator().manual_seed(0)
        self._number = 0

    def request(
        self,
        length: int,
        answer: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        image: tuple[int, int] | None = None,
    ) -> Request:
        """A prompt of random tokens that nobody has sent before, and of a new image of `image`'s
        height and width.
        """
        self._number += 1
        tokens = torch.randint(5, 250, (length,), generator=self._generator).tolist()
        sampling = SamplingParams(
            max_tokens=answer, ignore_eos=True, temperature=temperature, top_p=top_p, seed=1
        )
        if image is None:
            return Request(f"{self._number}", tuple(tokens), (), (), sampling)
        spec = qwen(self._spec)
        canvas = spec.recipe(*image, spec.pixel_bounds).canvas
        pixels = torch.randint(0, 256, (*canvas, 3), generator=self._generator, dtype=torch.uint8)
        key = ImageKey(self._number.to_bytes(32, "big"), bytes(16))
        self._pixels[key] = pixels
        grid = spec.images.grid(*canvas)
        shown = Image(key, grid, spec.num_tokens(grid), spec.num_patches(grid), canvas)
        expanded, spans = spec.expand_prompt([*tokens, spec.image_token_id, 7], [shown])
        return Request(f"{self._number}", expanded, spans, (shown,), sampling)

    def run(
        self,
        requests: Sequence[Request],
        watch: Callable[[Sequence[str]], None] | None = None,
        *,
        later: Sequence[Request] = (),
        every: int = 1,
    ) -> Progress:
        """All of them side by side to their ends. watch: told after each step who drew a token.
        later: requests that come one after another, each so many steps after the one before.
        """
        progress = Progress()
        for request in requests:
            self._add(request)
        begun: deque[tuple[Plan, Step]] = deque()
        due, encoding = deque(later), 0
        while not self.scheduler.idle or begun:
            if due and len(progress.steps) >= every * (1 + len(later) - len(due)):
                self._add(due.popleft())
            self._bring()
            while len(begun) < PLANS_IN_FLIGHT and not (plan := self.scheduler.plan()).empty:
                begun.append((plan, self.worker.begin(plan)))
                encoding += len(plan.encode)
                self._bring()
            if not begun:
                continue
            plan, step = begun.popleft()
            result = step.result()
            deltas = self.scheduler.apply(result)
            now = time.perf_counter()
            progress.news += deltas
            progress.encode_ms += [ms for _, ms, _ in result.encoded]
            drawn = sum(len(delta.tokens) for delta in deltas)
            prompt = plan.num_tokens > sum(row.sample for row in plan.rows)
            progress.steps.append(Tick(now, drawn, prompt, encoding > 0))
            encoding -= len(result.encoded)
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                if delta.tokens:
                    progress.first.setdefault(delta.id, now)
            if watch is not None:
                watch([delta.id for delta in deltas if delta.tokens])
        return progress

    def _add(self, request: Request) -> None:
        for delta in self.scheduler.add(request):
            raise InvalidRequest(delta.error or "the request was refused")

    def _bring(self) -> None:
        """The front's part: the pixels that were asked for."""
        for key, slot in self.scheduler.take_notices().want:
            self._arena.view(slot)[:] = self._pixels.pop(key).numpy()
            for delta in self.scheduler.pixels_ready(key):
                raise RuntimeError(delta.error)
