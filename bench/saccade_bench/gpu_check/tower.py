"""Stage `tower`: milliseconds to encode one image with Qwen3-VL-8B's vision encoder, by image size
and attention backend, with and without CUDA graphs, and its kernels in profile.md. The language
model has one layer.

The embeddings of each backend are compared with the embeddings of the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.core.config import EncoderConfig
from saccade.core.metrics import Metrics
from saccade.core.settings import CudaSettings, EngineSettings
from saccade.engine.sizing import resolve_encoder
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks
from saccade.plugins.gpu.libraries.installed import find_fa3
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.profile_step import Span, measure, spans_of
from saccade_bench.lab.engine_here import EngineModel, make_model
from saccade_bench.lab.qwen import grids, qwen

SIZES = {"720p": (720, 1280), "1080p": (1080, 1920), "1440p": (1440, 2560)}
"""Heights and widths in pixels."""
REPEATS = 12
PROFILED = ("1440p", "720p")
Graphs = Literal["graph", "a server's graphs", ""]
CUDA_WAYS: tuple[tuple[str, Graphs], ...] = (
    ("triton", "a server's graphs"),
    ("triton", "graph"),
    ("flash", "graph"),
    ("triton", ""),
    ("flash", ""),
)
"""Attention backends, and their graphs: of the image's size, of a server's sizes, or none."""
CPU_WAYS: tuple[tuple[str, Graphs], ...] = (("sdpa", ""),)


class TowerStage:
    """One vision encoder, measured with every backend."""

    def __init__(self, args: Any, file: FigureFile) -> None:
        self._file = file
        self._args = args
        self._quick: bool = args.quick
        self._device = torch.device(args.device)
        self._cuda = args.device == "cuda"
        dtype = torch.bfloat16 if self._cuda else torch.float32
        self._flops: float = args.products
        self._name = "tiny-qwen3-vl" if args.quick else args.preset
        self._model: EngineModel = make_model(self._name, self._device, dtype, layers=1)
        self._like = torch.empty(0, dtype=dtype, device=self._device)
        self._sizes = {"96p": (96, 160)} if args.quick else SIZES
        self._best: dict[str, dict[str, float]] = {}
        self._found: dict[str, torch.Tensor] = {}
        self._profiled = False

    def run(self) -> None:
        ways = CUDA_WAYS if self._cuda else CPU_WAYS
        if self._cuda and find_fa3():
            ways = (*ways, ("fa3", "graph"))
        for attention, graphs in ways:
            name = f"{attention}{', ' if graphs else ''}{graphs}"
            work = partial(self._way, name, attention, graphs)
            metric, fa3 = f"tower, {self._name}, {name}", attention == "fa3"
            self._file.attempt(metric, work, unit="ms", optional=fa3)
        for size, times in self._best.items():
            way = min(times, key=lambda each: times[each])
            metric = f"tower, {self._name}, {size}, best"
            self._file.add(Figure(metric, times[way], "ms", floor=self._floor(size), note=way))

    def _way(self, name: str, attention: str, graphs: Graphs) -> None:
        """Measure all image sizes with one backend."""
        net, positions = (
            self._model.net,
            PositionCache(self._model.spec, self._model.net.vision, Metrics()),
        )
        sizes: tuple[int, ...] = ()
        if graphs == "graph":
            sizes = tuple(sorted({self._patches(size) for size in self._sizes}))
        elif graphs:
            settings = EngineSettings(cuda=CudaSettings(mm_attention_backend=attention))
            sizes = resolve_encoder(
                settings, self._model.spec, cuda=True, half=True, beside=True
            ).graph_sizes
        config = EncoderConfig(attention, sizes)
        captured = CapturedPacks(net, config, self._like) if sizes else None
        encoder = PackedEncoder(net, positions, config, self._like, captured)
        for size in self._sizes:
            metric = f"tower, {self._name}, {size}, {name}"
            work = partial(self._time, metric, size, name, encoder)
            self._file.attempt(metric, work, unit="ms", optional=attention == "fa3")
        if not self._profiled:
            self._profiled = True
            for size in self._sizes if self._quick else PROFILED:
                metric = f"profile, tower, {self._name}, {size}, {name}"
                recorded = partial(self._record, size, encoder)
                profiled = partial(measure, recorded, metric, 1, self._args, self._file)
                self._file.attempt(metric, profiled)
        encoder.close()

    def _record(self, size: str, encoder: PackedEncoder) -> list[Span]:
        """Return the kernels that ran while an image was encoded."""
        there = self._drawn(size)
        kind = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as recorder:
            encoder.encode([there], grids(self._model.spec, [there]))
            self._settle()
        return spans_of(recorder, cuda=self._cuda)

    def _drawn(self, size: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (*self._resized(size), 3)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return pixels.to(self._device)

    def _time(self, metric: str, size: str, name: str, encoder: PackedEncoder) -> Figure:
        there = self._drawn(size)
        shown = grids(self._model.spec, [there])
        found = encoder.encode([there], shown)[0].float()
        if not bool(found.isfinite().all()):
            raise ArithmeticError("the embedding is not finite")
        wanted = self._found.setdefault(size, found)
        off = float((found - wanted).abs().max() / wanted.std())
        times = []
        for _ in range(2 if self._quick else REPEATS):
            self._settle()
            began = time.perf_counter()
            encoder.encode([there], shown)
            self._settle()
            times.append(1e3 * (time.perf_counter() - began))
        ms = statistics.median(times)
        self._best.setdefault(size, {})[name] = ms
        note = f"{self._patches(size)} patches, off by {off:.1e}"
        return Figure(metric, ms, "ms", floor=self._floor(size), note=note)

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _resized(self, size: str) -> tuple[int, int]:
        spec = self._model.spec
        height, width = spec.recipe(*self._sizes[size], spec.pixel_bounds).canvas
        return height, width

    def _patches(self, size: str) -> int:
        height, width = self._resized(size)
        return height * width // qwen(self._model.spec).images.patch ** 2

    def _floor(self, size: str) -> float:
        """Return the milliseconds of its matrix products and attention at this machine's speed."""
        patches, vision = self._patches(size), self._model.net.vision
        hidden = vision.hidden
        inner = 4304 if self._name == "qwen3-vl-8b" else 4 * hidden
        products = 2.0 * patches * hidden * (4 * hidden + 2 * inner)
        attention = 4.0 * patches * patches * hidden
        return 1e3 * vision.depth * (products + attention) / self._flops


def main() -> int:
    args = stage_arguments(__doc__)
    file = FigureFile(args.figures)
    file.attempt("tower", lambda: TowerStage(args, file).run())
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
