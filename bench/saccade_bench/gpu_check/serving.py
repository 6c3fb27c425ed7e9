"""Stage `serving`: a real server with random weights, and clients over HTTP: a chat of eight rounds
with a new image each, text streams next to new images, repeated requests, sliding windows of
images, many concurrent requests, and a probe of the maximum images per request. With --cold, only a
chat on a server without caches. With --unpaced, only the streams, on servers that prefill full
chunks of two sizes. With --fp8, a chat, and one stream and many, on a server with FP8 weights.

All clients use one server. A failed client does not affect the others.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from saccade_bench.gpu_check.figures import Figure, FigureFile, stage_arguments
from saccade_bench.gpu_check.machine import ROOT
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.metrics import series, total
from saccade_bench.started import Side, running

REPLAYS = ("saccade_graph_replays_total", "saccade_mixed_graph_replays_total")
STEPS = "saccade_steps_total"
SMALL_SERVER = (
    *("--threads", "1", "--media-workers", "1", "--max-total-tokens", "8192"),
    *("--context-length", "4096"),
)
HOST_TIERS = (
    *("--tune", "embedding_cache_host_mb=4096"),
    *("--tune", "kv_cache_host_mb=2048"),
)
"""Enough for all clients here, and pinned in one or two seconds. By default, a tenth of the host's
memory would be pinned during the first requests.
"""


NO_CACHES = (
    *("--tune", "disable_radix_cache=true", "--embedding-cache-device-mb", "0"),
    *("--tune", "embedding_cache_host_mb=0", "--tune", "kv_cache_host_mb=0"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the clients' workloads.

    chats: image sizes by name. Other clients use the first.
    at_once: number of requests with a new image each, and their concurrency.
    workloads: arguments of `saccade_bench.workloads`, whose tables are saved.
    """

    chats: tuple[tuple[str, str], ...]
    rounds: int
    answer: int
    streams: int
    streamed: int
    beside: int
    every: float
    probed: int
    step: int
    at_once: tuple[int, int]
    workloads: tuple[tuple[str, ...], ...]


UNPACED_TOKENS = (8192, 2048)
FP8_STREAMS = (1, 64)
CHATS = (("1440p", "2560x1440"), ("1080p", "1920x1080"), ("720p", "1280x720"))
WORKLOADS = (
    ("identical", "--size", "2560x1440", "--counts", "1", "8", "16", "24", "--users", "1"),
    ("window", "--published", "--turns", "4"),
)
FULL = Sizes(CHATS, 8, 32, 8, 1500, 8, 0.7, 24, 8, (64, 16), WORKLOADS)
SMALL_CHATS = (("96p", "160x96"), ("64p", "96x64"))
SMALL_WORKLOADS = (("identical", "--size", "96x64", "--counts", "1", "--turns", "2"),)
QUICK = Sizes(SMALL_CHATS, 2, 4, 2, 600, 3, 0.05, 2, 1, (3, 2), SMALL_WORKLOADS)


class ServingStage:
    """The clients of one server."""

    def __init__(self, args: Any, file: FigureFile) -> None:
        self._file = file
        self._folder: Path = args.figures.parent.resolve()
        self._quick: bool = args.quick
        self._device: str = args.device
        self._preset = "tiny-qwen3-vl" if args.quick else args.preset
        self._sizes = QUICK if args.quick else FULL
        self._cold: bool = args.cold
        self._fp8: bool = args.fp8
        self._unpaced: int | None = None  # chunk size in tokens
        self._until = time.monotonic() + args.seconds

    def run_unpaced(self) -> None:
        """Run streams next to images, on a server for each size of full chunks."""
        for tokens in (64, 32) if self._quick else UNPACED_TOKENS:
            self._unpaced = tokens
            self._file.attempt(f"streams beside chunks of {tokens}", self.run)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="saccade-check-") as name:
            folder = self._make_checkpoint(Path(name) / "model")
            began = time.monotonic()
            side = Side(f"serving{self._kind}-server", self._command(folder))
            with running(side, self._folder, self._until - began) as server:
                took = time.monotonic() - began
                self._file.add(Figure(f"start of a server{self._where}", took, "s"))
                for name, work in self._clients(server.url):
                    self._file.attempt(name, work)

    def _make_checkpoint(self, folder: Path) -> Path:
        if not self._fp8:
            return make_checkpoint(self._preset, folder)
        module = "saccade_bench.gpu_check.fp8_checkpoint"
        words = [sys.executable, "-m", module, self._preset, str(folder), self._device]
        subprocess.run(words, check=True, timeout=self._left, cwd=ROOT)
        return folder

    @property
    def _left(self) -> float:
        return max(1.0, self._until - time.monotonic())

    @property
    def _kind(self) -> str:
        return "-cold" * self._cold + "-fp8" * self._fp8

    @property
    def _where(self) -> str:
        how = ", without caches" * self._cold + ", FP8" * self._fp8
        return f", {self._preset}{how}{self._chunks}"

    @property
    def _chunks(self) -> str:
        return "" if self._unpaced is None else f", whole chunks of {self._unpaced}"

    # ---- clients

    def _clients(self, url: str) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        sizes = self._sizes
        if self._unpaced is not None:
            yield "streams", partial(self._streams, url)
            return
        if self._fp8:
            name, resolution = sizes.chats[-1]
            yield f"chat at {name}", partial(self._chat, url, name, resolution)
            for count in (1, 4) if self._quick else FP8_STREAMS:
                yield f"{count} streams", partial(self._streams, url, count)
            return
        for name, resolution in sizes.chats[: 1 if self._cold else None]:
            yield f"chat at {name}", partial(self._chat, url, name, resolution)
        if self._cold:
            return
        yield "streams", partial(self._streams, url)
        for name, resolution in sizes.chats[1:]:
            yield f"new images at {name}", partial(self._at_once, url, name, resolution)
        for words in sizes.workloads:
            yield words[0], partial(self._workload, url, words)
        yield "probe", partial(self._probe, url)
        yield "steps by graphs", partial(self._replays, url)

    def _at_once(self, url: str, name: str, resolution: str) -> Figure:
        """Measure requests per second, with a new image in each."""
        output, (count, abreast) = self._new(f"images-{name}.jsonl"), self._sizes.at_once
        shape = ("--image-resolution", resolution, "--random-input-len", "100")
        load = ("--num-prompts", str(count), "--max-concurrency", str(abreast))
        answer = ("--random-output-len", str(self._sizes.answer))
        self._client("bench", "serve", *shape, *load, *answer, url=url, output=output)
        summary = next(each for each in lines_of(output) if each["kind"] == "summary")
        metric = f"new images at {name}, {abreast} at a time"
        rate = summary["throughput"]["requests"]
        return Figure(metric, rate, "req/s", more=True, note=f"of {count}")

    def _workload(self, url: str, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "saccade_bench.workloads", *words, "--base-url", url]
        with self._new(f"{words[0]}.txt").open("w") as out:
            subprocess.run(command, check=True, timeout=self._left, cwd=ROOT, stdout=out)

    def _chat(self, url: str, name: str, resolution: str) -> None:
        sizes, output = self._sizes, self._new(f"chat-{name}.jsonl")
        data = ("--dataset-name", "multiturn-image", "--rounds", str(sizes.rounds))
        shape = ("--image-resolution", resolution, "--random-input-len", "100")
        load = ("--num-prompts", "2", "--max-concurrency", "1", "--trace")
        answer = ("--random-output-len", str(sizes.answer))
        self._client("bench", "serve", *data, *shape, *load, *answer, url=url, output=output)
        requests = [each for each in lines_of(output) if each["kind"] == "request"]
        for number, ms in enumerate(ttft_by_round(requests), 1):
            how = ", no caches" * self._cold + ", FP8" * self._fp8
            metric = f"chat at {name}{how}, TTFT of round {number}"
            note = "the quicker of two chats"
            self._file.add(Figure(metric, ms, "ms", note=note))

    def _streams(self, url: str, count: int | None = None) -> None:
        """Stream text next to images. count: the number of streams on a server with FP8 weights."""
        sizes, how = self._sizes, self._chunks
        if count is not None:
            sizes, how = replace(sizes, streams=count), f", FP8, {count} streams"
        output = self._new(f"beside{'' if count is None else f'-{count}'}.jsonl")
        _, resolution = sizes.chats[0]
        data = ("--dataset-name", "text-beside-images", "--text-streams", str(sizes.streams))
        images = ("--image-resolution", resolution, "--image-every", str(sizes.every))
        load = ("--num-prompts", str(sizes.beside), "--random-input-len", "100")
        answer = ("--random-output-len", str(sizes.streamed))
        self._client("bench", "serve", *data, *images, *load, *answer, url=url, output=output)
        summary = next(each for each in lines_of(output) if each["kind"] == "summary")
        for figure in beside_figures(summary["beside"], sizes):
            self._file.add(replace(figure, metric=figure.metric + how))

    def _probe(self, url: str) -> None:
        sizes, output = self._sizes, self._new("probe.jsonl")
        name, resolution = sizes.chats[0]
        climb = ("--max-images", str(sizes.probed), "--step", str(sizes.step), "--timeout", "60")
        shown = ("--resolutions", resolution, "--image-content", "random")
        self._client("probe", *climb, *shown, url=url, output=output)
        steps = lines_of(output)
        good = [each for each in steps if not each["failure"]]
        bad = next((each["failure"] for each in steps if each["failure"]), None)
        note = f"of {sizes.probed}" if bad is None else f"then {json.dumps(bad)[:150]}"
        most = max((each["images"] for each in good), default=0)
        metric = f"probe at {name}, images in one request"
        self._file.add(Figure(metric, most, "images", more=True, note=note))
        if good:
            last = good[-1]
            metric = f"probe at {name}, TTFT of {last['images']} new images"
            self._file.add(Figure(metric, last["ttft"], "ms"))

    def _replays(self, url: str) -> Figure:
        """Return the percentage of the language model's steps that were graph replays."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            replays, steps = count_steps(answer.read().decode())
        share = 100.0 * replays / max(1.0, steps)
        note = f"{replays:.0f} of {steps:.0f} steps"
        return Figure("steps by graphs", share, "%", more=True, note=note)

    def _client(self, *command: str, url: str, output: Path) -> None:
        whole = saccade(*command, "--base-url", url, "--output-file", str(output), "--quiet")
        subprocess.run(whole, check=True, timeout=self._left, cwd=ROOT)

    def _new(self, name: str) -> Path:
        how = "" if self._unpaced is None else f"unpaced-{self._unpaced}-"
        output = self._folder / f"serving{self._kind}-{how}{name}"
        output.unlink(missing_ok=True)
        return output

    # ---- the server

    def _command(self, folder: Path) -> str:
        more: tuple[str, ...] = NO_CACHES if self._cold else ()
        if self._quick or not self._cold:
            more += SMALL_SERVER if self._quick else HOST_TIERS
        if self._unpaced is not None:
            more += ("--chunked-prefill-size", str(self._unpaced))
        return server_command(folder, self._device, *more, dummy=not self._fp8)


def server_command(folder: Path, device: str, *more: str, dummy: bool = True) -> str:
    """Return the command line of a server in 16 bits, for `started.running`. dummy: with random
    weights, not the checkpoint's.
    """
    weights = ("--tune", "load_format=dummy") * dummy
    named = ("--served-model-name", "m", *weights, "--dtype", "bfloat16")
    words = saccade("serve", str(folder), *named, "--device", device, *more)
    return f"{shlex.join(words)} --port {{port}}"


def ttft_by_round(requests: Sequence[dict[str, Any]]) -> list[float]:
    """Return the minimum TTFT of each round. Raises RuntimeError if a request failed."""
    by_round: dict[int, list[float]] = {}
    for each in requests:
        if each.get("failure"):
            raise RuntimeError(f"a request of round {each['round']} failed: {each['failure']}")
        by_round.setdefault(each["round"], []).append(each["ttft"])
    return [min(by_round[number]) for number in sorted(by_round)]


def beside_figures(beside: dict[str, Any] | None, sizes: Sizes) -> list[Figure]:
    """Return figures of the gaps between tokens of text streams, without and with an image in
    flight.
    """
    if beside is None or not beside["images"]["n"]:
        raise RuntimeError("no token came while an image was in flight")
    alone, images = beside["alone"], beside["images"]
    note = f"{sizes.streams} streams, {images['n']} gaps, longest {images['max']:.1f} ms"
    beside_images = Figure("ITL P99 beside images", images["p99"], "ms", note=note)
    step = alone["median"] if alone["n"] else 0.0
    if not step:  # on a CPU, several tokens come at once
        return [beside_images]
    return [
        Figure("ITL of streams alone, median", step, "ms", note="a decode step"),
        beside_images,
        Figure("ITL P99 beside images, in decode steps", images["p99"] / step, "steps"),
    ]


def count_steps(metrics: str) -> tuple[float, float]:
    """Return (replays of full-step graphs, steps) from a server's metrics."""
    found = series(metrics)
    return sum(total(found, name) for name in REPLAYS), total(found, STEPS)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def saccade(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "saccade_bench", *arguments]


def main() -> int:
    args = stage_arguments(__doc__)
    file = FigureFile(args.figures)
    stage = ServingStage(args, file)
    file.attempt("serving", stage.run_unpaced if args.unpaced else stage.run)
    return bool(file.failures)


if __name__ == "__main__":
    sys.exit(main())
