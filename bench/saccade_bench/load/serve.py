"""`saccade bench serve`: measure an OpenAI-compatible server under a workload.

A run finds the model, measures how the server tokenizes text, generates the workload, warms up,
sends the requests, and reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import (
    Progress,
    TaskID,
)

from saccade_bench.counted import bars
from saccade_bench.load.client import BenchClient
from saccade_bench.load.datasets import FROM_FILES, Calibration, Recipe, build, warmup
from saccade_bench.load.journal import write_run
from saccade_bench.load.load import LoadRun, Record, drive
from saccade_bench.load.measure import Summary, parse_goodput, parse_metrics, summarise, ttft
from saccade_bench.load.table import print_summary
from saccade_bench.load.words import WORDS
from saccade_bench.load.workload import PreparedChat, Template, parse_extra, prepare
from saccade_bench.metrics import series
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    PastedOptions,
    RandomMM,
    TargetOptions,
    TextOptions,
)

WORK = {
    "saccade_video_frames_decoded_total": "frames of video files decoded",
    "saccade_images_decoded_total": "images and pairs decoded",
    "saccade_images_encoded_total": "encoded",
    "saccade_duplicate_images_total": "of pixels seen under another name",
    'saccade_position_cache_lookups_total{kind="encoder",outcome="miss"}': "positions computed",
}
"""A Saccade server's counters of work that caches avoid, with labels for printing."""


TOKENIZED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Bench:
    """All options of one run."""

    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    data: DatasetOptions = field(default_factory=DatasetOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    text: TextOptions = field(default_factory=TextOptions)
    random_mm: RandomMM = field(default_factory=RandomMM)
    output: OutputOptions = field(default_factory=OutputOptions)
    pasted: PastedOptions = field(default_factory=PastedOptions)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run.

    `model` is the name sent in requests. `work` is the increase of the server's counters in WORK
    after warm-up. It is empty if the server has none.
    """

    model: str
    run: LoadRun
    summary: Summary
    calibration: Calibration
    work: Mapping[str, int]


def serve(bench: Bench) -> Measured:
    """Run the benchmark, print the summary, and append it to --output-file.

    Raises ConfigError if the options are invalid or the server is unreachable.
    """
    measured = uvloop.run(measure(bench))
    output = bench.output
    label = output.label or measured.model
    if not output.quiet:
        name = bench.data.dataset_name
        print_summary(
            measured.summary,
            f"{label}: {name}, {bench.load.num_prompts} prompts",
            drawn=name not in FROM_FILES,
            latencies=parse_metrics(output.percentile_metrics),
        )
        if measured.work:
            told = ", ".join(f"{WORK[name]} {count}" for name, count in measured.work.items())
            print(f"By the server's /metrics: {told}.")
    if output.output_file:
        options = {"model": measured.model, **_options(bench)}
        write_run(
            output.output_file,
            label,
            options,
            measured.run,
            measured.summary,
            measured.calibration,
            output.save_text,
        )
    return measured


async def measure(bench: Bench) -> Measured:
    """Run the benchmark without printing the summary."""
    bounds, extra = (
        parse_goodput(bench.output.goodput),
        parse_extra(bench.target.extra_request_body),
    )
    async with BenchClient(bench.target) as client:
        model = bench.target.model or await client.model()
        calibration = await calibrate(client, model)
        recipe = Recipe(
            bench.data,
            bench.load,
            bench.images,
            bench.text,
            bench.random_mm,
            calibration,
            symmetric=bench.pasted.backend == "openai-chat",
        )
        template = Template.build(
            model, extra, not bench.text.disable_ignore_eos, bench.output.trace
        )
        with _display(bench.output.quiet) as display:
            first = prepare(warmup(recipe))
            chats = prepare(build(recipe), display.drawn)
            if first:
                await drive(
                    client, first, template, LoadOptions(len(first), bench.load.max_concurrency)
                )
            display.begin(chats)
            before = await counters(client)
            run = await drive(client, chats, template, bench.load, display.answered)
            after = await counters(client)
        retokenized = await count_again(client, model, run)
    work = {name: round(after[name] - before.get(name, 0)) for name in after}
    summary = replace(summarise(run, calibration, bounds), retokenized=retokenized)
    return Measured(model, run, summary, calibration, work)


async def count_again(client: BenchClient, model: str, run: LoadRun) -> int | None:
    """Return the server's token count of all answers. Return None if it has no /tokenize."""
    texts = [each.reply.text for each in run.records if each.reply.failure is None]
    total = 0
    for first in range(0, len(texts), TOKENIZED_AT_ONCE):
        some = texts[first : first + TOKENIZED_AT_ONCE]
        for count in await asyncio.gather(*(client.count_tokens(model, text) for text in some)):
            if count is None:
                return None
            total += count
    return total if texts else None


async def counters(client: BenchClient) -> dict[str, float]:
    """Return the current values of the server's counters in WORK. Empty if it has none."""
    found = series(await client.text("/metrics") or "")
    return {name: value for name, value in found.items() if name in WORK}


async def calibrate(client: BenchClient, model: str) -> Calibration:
    """Measure how many tokens the server counts for text, from two requests of 32 and 160 words."""
    points = []
    for count in (32, 160):
        text = " ".join(WORDS[i * 7 % len(WORDS)] for i in range(count))
        reply = await client.complete(
            {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1,
                "temperature": 0,
            }
        )
        tokens = ((reply or {}).get("usage") or {}).get("prompt_tokens")
        if not isinstance(tokens, int):
            return Calibration()
        points.append((len(text), tokens))
    (short, few), (long, many) = points
    per_char = (many - few) / (long - short)
    return Calibration(few - per_char * short, per_char) if per_char > 0 else Calibration()


def _options(bench: Bench) -> dict[str, object]:
    """Return every option by its name.

    API keys, headers and directories of local files are left out, because results are published.
    """
    groups = (bench.target, bench.load, bench.data, bench.images, bench.text, bench.random_mm)
    named = {
        name: value
        for group in groups
        for name, value in asdict(group).items()
        if name not in ("api_key", "header", "model")
    }
    path = bench.data.dataset_path
    return {**named, "dataset_path": Path(path).name if path and Path(path).exists() else path}


class _Display:
    """Progress bars: first of generated images, then of finished requests and the last TTFT."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._drawing: TaskID | None = None
        self._asking: TaskID | None = None
        self._failed = 0
        self._times: list[float] = []

    def drawn(self, done: int, total: int) -> None:
        if self._drawing is None:
            self._drawing = self._progress.add_task("drawing pictures", total=total)
        self._progress.update(self._drawing, completed=done)

    def begin(self, chats: tuple[PreparedChat, ...]) -> None:
        self._asking = self._progress.add_task(
            "asking", total=sum(len(chat.turns) for chat in chats)
        )

    def answered(self, record: Record) -> None:
        assert self._asking is not None, "begin() comes first"
        if record.reply.failure:
            self._failed += 1
        else:
            self._times.append(ttft(record))
        last = f", last TTFT {self._times[-1]:.0f} ms" if self._times else ""
        self._progress.update(
            self._asking,
            advance=1,
            description=f"asking{last}" + (f", {self._failed} failed" if self._failed else ""),
        )


@contextmanager
def _display(quiet: bool) -> Iterator[_Display]:
    with bars(Console(stderr=True), quiet=quiet) as progress:
        yield _Display(progress)
