"""A scheduler and a worker with a randomly initialized model in one process, without a front.

As in a server, two plans are in flight. Weights have 16 bits, or optionally FP8 for the language
model's matrices, as in FP8 checkpoints.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig
from saccade.core.errors import InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.options import CacheOptions, EngineOptions, ModelOptions
from saccade.core.plan import PLANS_IN_FLIGHT, Plan
from saccade.core.settings import EngineSettings, TierSettings
from saccade.core.types import Image, ImageKey, Request, SamplingParams
from saccade.engine.schedulers import build_scheduler
from saccade.engine.sizing import resolve
from saccade.families.registry import family_model, load_spec
from saccade.kernels.matrix import MIN_FP8_GROUP, DenseMatrix, Fp8Matrix, Matrix
from saccade.kernels.reference.fp8 import LARGEST, prepare, to_fp8
from saccade.nn.embedding import HEAD
from saccade.nn.protocol import FamilyNet
from saccade.nn.weights import Part
from saccade.parallel import UNSHARDED
from saccade.runtime.inflight_step import Step
from saccade.runtime.process import measure_hardware
from saccade.runtime.vision.streams import put_first
from saccade.runtime.weights.dummy import DummyWeights
from saccade.runtime.worker import Worker
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.qwen import grids, qwen

STANDING_OUT = 40
"""Number of tokens that are much likelier than the others, as with trained models."""
BLOCK = 128
"""Maximum number of inputs per scale."""


class RandomWeights(DummyWeights):
    """The weights of a server with --tune load_format=dummy, but in FP8 if `eight` returns True for
    the canonical name. `nbytes` is the size of the language model's tensors. Each step reads all of
    them.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, eight: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__(dtype, device)
        self.nbytes = 0
        self._eight = eight

    def load(self, *parts: Part) -> torch.Tensor:
        whole = super().load(*parts)
        if parts[0].name == HEAD:
            whole[:STANDING_OUT] *= 8  # the sampler's run time depends on how flat logits are
        self._count(parts, whole.nbytes)
        return whole

    def load_matrix(self, *parts: Part) -> Matrix:
        weight = self.load(*parts)
        inputs = weight.shape[1]
        block = math.gcd(inputs, BLOCK)
        if not self._eight or block < MIN_FP8_GROUP or not all(self._eight(p.name) for p in parts):
            return DenseMatrix(weight)
        high = math.gcd(BLOCK, *(part.wanted[0] for part in parts))
        groups = weight.float().view(-1, high, inputs // block, block)
        scales = (groups.abs().amax((1, 3)) / LARGEST).repeat_interleave(high, 0)
        values = to_fp8(groups.flatten(0, 1), scales[..., None]).view(weight.shape)
        self._count(parts, values.nbytes - weight.nbytes)
        return prepare(Fp8Matrix(values, scales, block), self.dtype)

    def _count(self, parts: tuple[Part, ...], nbytes: int) -> None:
        if not any(part.name.startswith("visual") for part in parts):
            self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model. `read_bytes` is how much of its weights a step of the language model reads."""

    net: FamilyNet
    spec: FamilySpec
    read_bytes: int


def make_model(
    preset: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 0,
    fp8: bool = False,
) -> EngineModel:
    """Build a preset with `layers` language model layers (0: all), in FP8 if `fp8`."""
    with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
        folder = Path(name) / "model"
        make_checkpoint(preset, folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        if layers:
            config["text_config"]["num_hidden_layers"] = layers
            path.write_text(json.dumps(config))
        spec = load_spec(folder)
    model = family_model(spec)
    weights = RandomWeights(dtype, device, model.projection if fp8 else None)
    net = model.build(weights, UNSHARDED, UNSHARDED)
    text = config["text_config"]
    table = text["vocab_size"] * text["hidden_size"] * dtype.itemsize
    tied = config["tie_word_embeddings"]
    # If the token embedding is not tied to the head, a step only reads its tokens' rows.
    return EngineModel(net, spec, weights.nbytes - (0 if tied else table))


ARENA_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Tick:
    """The end of a step in `time.perf_counter()` seconds, and its number of sampled tokens."""

    at: float
    drawn: int


@dataclass
class Progress:
    """Time of the first token by request id, and all steps, in `time.perf_counter()` seconds."""

    first: dict[str, float] = field(default_factory=dict)
    steps: list[Tick] = field(default_factory=list)


class EngineHere:
    """A scheduler and a worker with one model, configured as in a server without a prefix cache."""

    def __init__(
        self, model: EngineModel, device: str, dtype: Dtype, options: EngineOptions
    ) -> None:
        if device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # as in a server
        hardware = measure_hardware("cuda" if device == "cuda" else "cpu")
        caches = CacheOptions(disable_radix_cache=True)
        settings = EngineSettings(tiers=TierSettings(embedding_cache_host_mb=0))
        config = resolve(ModelOptions(), options, model.spec, dtype, hardware, 1, caches, settings)
        self.config: EngineConfig = config
        if config.device == "cuda":
            put_first(torch.device("cuda"))
        self._spec = model.spec
        self._pixels: dict[ImageKey, np.ndarray] = {}
        self._arena = Arena.create(ARENA_BYTES)
        self.worker = Worker(model.net, config, self._arena)
        self.scheduler = build_scheduler(config, model.spec, (), self._arena.size, 0.5)
        self._generator = torch.Generator().manual_seed(0)
        self._number = 0

    def request(
        self,
        length: int,
        answer: int,
        *,
        image: np.ndarray | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> Request:
        """Return a request with a new random prompt of `length` tokens, and `answer` output tokens.

        `image` is prepended, as resized uint8 [H, W, 3].
        """
        self._number += 1
        tokens = torch.randint(5, 250, (length,), generator=self._generator).tolist()
        sampling = SamplingParams(
            max_tokens=answer, ignore_eos=True, temperature=temperature, top_p=top_p, seed=1
        )
        images = [] if image is None else [self._image(image)]
        marks = [qwen(self._spec).image_token_id] * len(images)
        expanded, spans = self._spec.expand_prompt([*marks, *tokens], images)
        return Request(f"{self._number}", tuple(expanded), spans, tuple(images), sampling)

    def _image(self, pixels: np.ndarray) -> Image:
        key = ImageKey(self._number.to_bytes(32, "big"), bytes(16))
        self._pixels[key] = pixels
        (grid,) = grids(self._spec, [pixels])
        num_tokens, num_patches = self._spec.num_tokens(grid), self._spec.num_patches(grid)
        return Image(key, grid, num_tokens, num_patches, (pixels.shape[0], pixels.shape[1]))

    def close(self) -> None:
        self.worker.close()
        self._arena.close()

    def run(
        self,
        requests: Sequence[Request],
        watch: Callable[[Plan, Sequence[str]], None] | None = None,
        in_flight: int = PLANS_IN_FLIGHT,
    ) -> Progress:
        """Run requests together until all are finished.

        `watch` is called after each step with its plan and the ids of the requests that got a
        token.
        """
        progress = Progress()
        for request in requests:
            for delta in self.scheduler.add_request(request):
                raise InvalidRequest(delta.error or "the request was refused")
        begun: deque[tuple[Plan, Step]] = deque()
        while not self.scheduler.idle or begun:
            for key, slot in self.scheduler.take_notices().want:
                self._arena.view(slot)[:] = self._pixels.pop(key)
                self.scheduler.pixels_ready(key)
            while len(begun) < in_flight and not (plan := self.scheduler.plan()).empty:
                begun.append((plan, self.worker.begin_step(plan)))
            if not begun:
                continue
            plan, step = begun.popleft()
            deltas = self.scheduler.apply(step.result())
            now = time.perf_counter()
            progress.steps.append(Tick(now, sum(len(delta.tokens) for delta in deltas)))
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                if delta.tokens:
                    progress.first.setdefault(delta.id, now)
            if watch is not None:
                watch(plan, [delta.id for delta in deltas if delta.tokens])
        return progress
