"""`saccade bench media`: the CPU time of an image from the request to the vision encoder, for
Saccade and a baseline in the same run.

Saccade's path is `saccade.media.media.Media` with an image worker, up to the bfloat16 patches that
enter the vision encoder (normalization is folded into its weights). The baseline is Pillow,
transformers' Pillow-backend processor, SHA-256 of the float features, and a pickle to another
process. Both start from a data URL. Times are CPU ms of all processes involved. The paths
alternate, and results are medians.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pybase64
import torch
from rich.console import Console

from saccade.core.arena import Arena
from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.model_folder import resolve_model
from saccade.core.options import MediaOptions, ServeOptions
from saccade.core.plan import PixelSlot
from saccade.families.registry import load_spec
from saccade.kernels.ops import pick_ops
from saccade.media.content import Budget, digest, identify
from saccade.media.formats.decode import decode, decode_into, draw_into
from saccade.media.formats.header import probe
from saccade.media.formats.pixel_operations import Pixels
from saccade.media.media import Media
from saccade.media.sources.source import ImageSource
from saccade_bench.counted import each
from saccade_bench.image_files import data_url
from saccade_bench.lab.machine import CpuClock, describe, make_room
from saccade_bench.lab.media_report import OUR_STAGES, Case, MediaFigure, Sample, tables
from saccade_bench.lab.options import MediaBenchOptions
from saccade_bench.lab.qwen import qwen
from saccade_bench.load.images import DrawnImage, encode, parse_size

SEEN_AT_ONCE = 20
"""Requests per measurement of a repeated image, because one takes too little time to measure."""
ARENA_PICTURES = 2
"""Number of images of the largest size for which the arena has space. It is small so that memory is
reused soon, as in a server that has run for some time.
"""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt


@dataclass(slots=True)
class CaseRuns:
    """All measurements of one case, one per run."""

    stages: list[dict[str, Sample]] = field(default_factory=list)
    new: list[Sample] = field(default_factory=list)
    seen: list[Sample] = field(default_factory=list)
    usual_stages: list[dict[str, Sample]] = field(default_factory=list)
    usual: list[Sample] = field(default_factory=list)


def bench_media(options: MediaBenchOptions) -> list[MediaFigure]:
    """Measure all cases, print tables, and write the output file.

    Raises ConfigError before measuring if an option is invalid or a package is missing.
    """
    make_room(options, "output_file")
    folder = resolve_model(options.model)
    spec, processor = load_spec(folder), load_processor(folder)
    torch.set_num_threads(1)
    keep_memory()
    pictures = draw(options)
    with reader() as (connection, pid):
        usual = Usual(processor, connection, CpuClock(pid))
        results = asyncio.run(measure(options, spec, usual, pictures))
    if options.output_file:
        head = {"machine": describe(), "repeats": options.repeats}
        options.output_file.write_text(json.dumps(head | as_json(results), indent=2) + "\n")
    if not options.quiet:
        Console(highlight=False).print(tables(results))
    return results


def draw(options: MediaBenchOptions) -> dict[Case, bytes]:
    """Return an encoded image for every case."""
    sizes = [parse_size(name) for name in options.resolutions]
    cases = [
        Case(*size, kind, content)
        for size in sizes
        for kind in options.image_formats
        for content in options.image_contents
    ]
    return {
        case: encode(DrawnImage(case.content, case.width, case.height, options.seed, case.format))
        for case in each(cases, "drawing", quiet=options.quiet)
    }


async def measure(
    options: MediaBenchOptions, spec: FamilySpec, usual: Usual, pictures: dict[Case, bytes]
) -> list[MediaFigure]:
    """Measure all cases in each round. The first round is a warm-up."""
    largest = max(
        math.prod(spec.recipe(case.height, case.width, spec.pixel_bounds).canvas)
        for case in pictures
    )
    arena = Arena.create(ARENA_PICTURES * 3 * largest)
    media = Media(spec, ServeOptions(media=MediaOptions(media_workers=1)), arena, Metrics())
    media.start()
    try:
        ours = await Ours.start(media, arena, spec)
        runs = {case: CaseRuns() for case in pictures}
        for number in each(range(options.repeats + 1), "measuring", quiet=options.quiet):
            for case, data in pictures.items():
                run = runs[case] if number else CaseRuns()
                stages, whole = usual.run(data_url(data, f"image/{case.format}"))
                run.usual_stages.append(stages)
                run.usual.append(whole)
                unseen = data + number.to_bytes(
                    8, "big"
                )  # appended after the end of the image, where decoders ignore it
                run.new.append(await ours.new(data_url(unseen, f"image/{case.format}")))
                run.seen.append(await ours.seen(data_url(unseen, f"image/{case.format}")))
                run.stages.append(ours.stages(data_url(unseen, f"image/{case.format}")))
        return [summarise(case, run) for case, run in runs.items()]
    finally:
        await media.close()
        arena.close()


class Ours:
    """Saccade's path, in full and by stage."""

    def __init__(self, media: Media, arena: Arena, spec: FamilySpec) -> None:
        self._media = media
        self._arena = arena
        self._bench = Arena.create(arena.size)  # for measuring single stages
        self._spec = spec
        workers = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if child.name() == "saccade-decode"
        ]
        assert len(workers) == 1
        self._clock = CpuClock(*workers)
        self._inline = CpuClock()
        self._ops = pick_ops(torch.device("cpu"), torch.bfloat16)

    @classmethod
    async def start(cls, media: Media, arena: Arena, spec: FamilySpec) -> Ours:
        """Wait until the image worker is ready."""
        picture = await media.open(
            ImageSource(encode(DrawnImage("blank", 64, 64, 0)), "warm-up"), ""
        )
        media.hold_image(picture)
        await media.decode(picture.image.key, PixelSlot(0, *picture.image.canvas))
        media.release_image(picture)
        return cls(media, arena, spec)

    async def new(self, url: str) -> Sample:
        """Measure a new image from URL to patches. The sample's bytes are its resized pixels."""
        begun = self._clock.ms()
        picture = await self._media.open(ImageSource(url, "picture"), "")
        self._media.hold_image(picture)
        slot = PixelSlot(0, *picture.image.canvas)
        await self._media.decode(picture.image.key, slot)
        self._patches(self._arena.view(slot))
        self._media.release_image(picture)
        return Sample(self._clock.ms() - begun, slot.nbytes)

    async def seen(self, url: str) -> Sample:
        """Measure the same image again, when the engine has it cached. No bytes are sent."""
        begun = self._clock.ms()
        for _ in range(SEEN_AT_ONCE):
            picture = await self._media.open(ImageSource(url, "picture"), "")
            self._media.hold_image(picture)
            self._media.release_image(picture)
        return Sample((self._clock.ms() - begun) / SEEN_AT_ONCE, 0)

    def stages(self, url: str) -> dict[str, Sample]:
        """Measure each stage separately in this process, without the transfer to the worker."""
        lap = Laps(self._inline)
        text = url.partition(",")[2]
        data = lap("base64", len(text), lambda: pybase64.b64decode(text, validate=True))
        name = lap("digest", len(data), lambda: digest(data))
        found, content = lap("header", len(data), lambda: _read_header(name, data, self._spec))
        height, width = content.recipe.canvas
        slot = PixelSlot(0, height, width)
        target = self._bench.view(slot)
        whole = target, content.recipe
        encoded = memoryview(data)
        if found.upright == content.recipe.canvas and found.orientation == 1:
            lap("decode", len(data), lambda: decode_into([whole], encoded, found.upright, 1))
        else:
            upright, strips = lap("decode", len(data), lambda: decode(encoded, found.orientation))
            pixel_bytes = 3 * upright[0] * upright[1]
            lap("resize", pixel_bytes, lambda: draw_into([whole], upright, strips))
        lap("patches", slot.nbytes, lambda: self._patches(target))
        return lap.done

    def _patches(self, pixels: Pixels) -> torch.Tensor:
        """Return rows of patches as the engine makes them on its device, which is the CPU here."""
        rules = qwen(self._spec).images
        still = torch.from_numpy(pixels)[None]
        return self._ops.centre_patches(still, rules.patch, rules.merge, torch.bfloat16)


class Usual:
    """The baseline path, which runs for every image of every request."""

    def __init__(
        self, processor: Callable[..., Any], connection: Connection, clock: CpuClock
    ) -> None:
        self._processor = processor
        self._connection = connection
        self._clock = clock

    def run(self, url: str) -> tuple[dict[str, Sample], Sample]:
        """Return the stages, and their sum with the size of the pickle that is sent."""
        lap = Laps(self._clock)
        text = url.partition(",")[2]
        data = lap("base64", len(text), lambda: base64.b64decode(text))
        image = lap("decode", len(data), lambda: PIL.Image.open(io.BytesIO(data)).convert("RGB"))
        inputs = lap(
            "processor", image.width * image.height * 3, lambda: self._processor(images=image)
        )
        features: np.ndarray[Any, np.dtype[np.float32]] = inputs["pixel_values"]
        name = lap("sha256", features.nbytes, lambda: hashlib.sha256(features.data).digest())
        shipped = lap("pickle", features.nbytes, lambda: self._ship({"digest": name, **inputs}))
        return lap.done, Sample(sum(stage.ms for stage in lap.done.values()), shipped)

    def _ship(self, message: dict[str, Any]) -> int:
        pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._connection.send_bytes(pickled)
        self._connection.recv_bytes()
        return len(pickled)


class Laps:
    """CPU time of consecutive stages."""

    def __init__(self, clock: CpuClock) -> None:
        self._clock = clock
        self.done: dict[str, Sample] = {}

    def __call__(self, stage: str, nbytes: int, work: Callable[[], Any]) -> Any:
        begun = self._clock.ms()
        result = work()
        self.done[stage] = Sample(self._clock.ms() - begun, nbytes)
        return result


def keep_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system.

    Otherwise, page faults for large blocks can cost more than the work itself, mostly in the
    baseline.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


@contextmanager
def reader() -> Iterator[tuple[Connection, int]]:
    """Start a process that unpickles its input. Yields our end of the connection and its pid."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_unpickle_all, args=(theirs,), daemon=True
    )
    process.start()
    theirs.close()
    try:
        ours.recv_bytes()  # the process is ready
        assert process.pid is not None
        yield ours, process.pid
    finally:
        ours.close()
        process.join()


def _unpickle_all(connection: Connection) -> None:
    keep_memory()
    try:
        connection.send_bytes(b"ready")
        while True:
            pickle.loads(connection.recv_bytes())
            connection.send_bytes(b"done")
    except EOFError:
        pass


def load_processor(folder: Path) -> Callable[..., Any]:
    """Load transformers' Pillow-backend image processor for the checkpoint in `folder`.

    Raises ConfigError.
    """
    try:
        module = importlib.import_module(
            "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
        )
    except ImportError:
        raise ConfigError(
            "the usual way needs transformers 5 with its Pillow processors: "
            + how_to_install(".[train]")
        ) from None
    try:
        processor: Callable[..., Any] = module.Qwen2VLImageProcessorPil.from_pretrained(folder)
    except OSError:
        raise ConfigError(
            f"--model {folder}: there is no preprocessor_config.json in it that transformers "
            "can read"
        ) from None
    return processor


def _read_header(name: bytes, data: bytes, spec: FamilySpec) -> Any:
    found = probe(data, MediaOptions().max_image_pixels)
    return found, identify(name, found, Budget(), "", spec)


def summarise(case: Case, runs: CaseRuns) -> MediaFigure:
    """Return the medians by stage.

    The time of the full path beyond its stages is attributed to the transfer to the worker and
    back ("hand-over").
    """
    stages = {name: _median([run[name] for run in runs.stages]) for name in runs.stages[0]}
    usual_stages = {
        name: _median([run[name] for run in runs.usual_stages]) for name in runs.usual_stages[0]
    }
    new = _median(runs.new)
    rest = max(0.0, new.ms - sum(stage.ms for stage in stages.values()))
    stages["hand-over"] = Sample(rest, stages["digest"].nbytes)
    ordered = {name: stages[name] for name in OUR_STAGES if name in stages}
    return MediaFigure(case, ordered, new, _median(runs.seen), usual_stages, _median(runs.usual))


def _median(samples: list[Sample]) -> Sample:
    return Sample(median(sample.ms for sample in samples), samples[0].nbytes)


def as_json(results: list[MediaFigure]) -> dict[str, Any]:
    gains = [
        {"gain_new": round(result.gain_new, 2), "gain_seen": round(result.gain_seen, 1)}
        for result in results
    ]
    return {"cases": [asdict(result) | gain for result, gain in zip(results, gains, strict=True)]}
