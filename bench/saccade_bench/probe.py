"""`saccade probe`: the number of images in one request at which a server fails, by resolution.

Sends requests with 1, 2, 3 ... images, one at a time, until the first failure. Every image is new,
so that no request hits a cache. The server's memory is read from /metrics, or from the operating
system if the server runs on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit

import psutil
import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table

from saccade_bench import plot_style
from saccade_bench.load.client import BenchClient, BenchReply, Failure
from saccade_bench.load.images import Dice, DrawnImage, Sizes, parse_resolution
from saccade_bench.load.workload import Session, Template, Turn, parse_extra, prepare
from saccade_bench.metrics import series, total
from saccade_bench.options import ProbeOptions, TargetOptions

TIMEOUT = 120.0
QUESTION = "How many pictures are there?"


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One request: the number of images, the outcome, and the server's resident memory
    afterwards in bytes (None if unknown). `ttft` and `e2e` are in ms.
    """

    resolution: str
    images: int
    ttft: float | None
    e2e: float
    prompt_tokens: int | None
    body_bytes: int
    memory: int | None
    failure: Failure | None


def probe(target: TargetOptions, options: ProbeOptions) -> list[ProbeStep]:
    """Probe every resolution, and print and save the results.

    Raises ConfigError if the options are invalid or the server is unreachable.
    """
    steps: list[ProbeStep] = []
    console = Console(highlight=False, quiet=options.quiet)
    live = Live(table(steps), console=console, refresh_per_second=4)

    def told(step: ProbeStep) -> None:
        steps.append(step)
        live.update(table(steps))
        if options.output_file:
            with options.output_file.open("a") as file:
                file.write(json.dumps(asdict(step)) + "\n")

    uvloop.run(_climb_all(target, options, live, told))
    console.print()
    for line in verdicts(steps):
        console.print(line)
    if options.plot:
        options.plot.write_bytes(plot(steps))
    return steps


async def _climb_all(
    target: TargetOptions, options: ProbeOptions, live: Live, told: Callable[[ProbeStep], None]
) -> None:
    """Probe all resolutions. The table is only shown once the server has responded."""
    extra = parse_extra(target.extra_request_body)
    sizes = [parse_resolution(resolution, "--resolutions") for resolution in options.resolutions]
    async with BenchClient(replace(target, timeout=target.timeout or TIMEOUT)) as client:
        template = Template.build(
            target.model or await client.model(), extra, ignore_eos=False, trace=False
        )
        with live:
            for place, (resolution, size) in enumerate(
                zip(options.resolutions, sizes, strict=True)
            ):
                dice = Dice(options.seed, place)
                first = _session(dice, size, 1, options)
                await client.stream(
                    template.body(prepare([first])[0], 0, ())
                )  # so that one-time work of the server is not measured
                for count in _counts(options):
                    chat = prepare([_session(dice, size, count, options)])[0]
                    body = template.body(chat, 0, ())
                    reply = await client.stream(body)
                    told(
                        _step(
                            resolution,
                            count,
                            len(body),
                            reply,
                            await memory(client, target.url),
                        )
                    )
                    if reply.failure:
                        break


def _counts(options: ProbeOptions) -> Iterator[int]:
    """Yield 1, then every multiple of `step`, and always the maximum."""
    counts = {1, options.max_images, *range(options.step, options.max_images + 1, options.step)}
    yield from sorted(count for count in counts if count <= options.max_images)


def _session(dice: Dice, sizes: Sizes, count: int, options: ProbeOptions) -> Session:
    drawn = [
        DrawnImage(
            options.image_content, *sizes.draw(dice), dice.between(0, 1 << 60), options.image_format
        )
        for _ in range(count)
    ]
    return Session((Turn((*drawn, QUESTION), options.max_tokens),))


def _step(
    resolution: str, count: int, size: int, reply: BenchReply, resident: int | None
) -> ProbeStep:
    first = 1e3 * (reply.arrivals[0] - reply.sent) if reply.arrivals else None
    return ProbeStep(
        resolution,
        count,
        first,
        1e3 * (reply.done - reply.sent),
        reply.usage.prompt,
        size,
        resident,
        reply.failure,
    )


# The server's memory


async def memory(client: BenchClient, base_url: str) -> int | None:
    """Return the server's resident memory in bytes, or None if it is unknown.

    It is measured by the operating system if the server runs on this machine, and otherwise read
    from /metrics.
    """
    url = urlsplit(base_url)
    if url.hostname in ("127.0.0.1", "localhost", "::1") and url.port:
        found = _resident(url.port)
        if found:
            return found
    page = series(await client.text("/metrics") or "")
    return int(total(page, "process_resident_memory_bytes")) or None


def _resident(port: int) -> int | None:
    """Return the proportional memory of the process that listens on a port and of its children, in
    bytes. Return None if the process is not visible.
    """
    try:
        owner = next(
            (
                c.pid
                for c in psutil.net_connections("tcp")
                if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
            ),
            None,
        )
        if owner is None:
            return None
        process = psutil.Process(owner)
        # Proportional set size (PSS) counts shared pages once, where the system reports it.
        return sum(_bytes(member) for member in (process, *process.children(recursive=True)))
    except (psutil.Error, OSError):
        return None


def _bytes(process: psutil.Process) -> int:
    info = process.memory_full_info()._asdict()
    return int(info.get("pss") or info["rss"])


# Printed output


def table(steps: Sequence[ProbeStep]) -> Table:
    """Return the steps as a table with a row per request and a section per resolution."""
    view = Table(
        "resolution", "pictures", "TTFT ms", "per picture", "prompt", "sent MB", "RSS MB", ""
    )
    for column in view.columns[1:7]:
        column.justify = "right"
    for before, step in zip([None, *steps], steps):
        if before is not None and before.resolution != step.resolution:
            view.add_section()
        view.add_row(
            step.resolution,
            str(step.images),
            "-" if step.ttft is None else f"{step.ttft:.0f}",
            "-" if step.ttft is None else f"{step.ttft / step.images:.1f}",
            "-" if step.prompt_tokens is None else str(step.prompt_tokens),
            f"{step.body_bytes / 1e6:.1f}",
            "-" if step.memory is None else f"{step.memory / 1e6:.0f}",
            "" if step.failure is None else step.failure.kind,
            style="red" if step.failure else None,
        )
    return view


def verdicts(steps: Sequence[ProbeStep]) -> list[str]:
    """Return one sentence per resolution."""
    lines = []
    for resolution in dict.fromkeys(step.resolution for step in steps):
        group = [step for step in steps if step.resolution == resolution]
        good = [step for step in group if step.failure is None]
        most = (
            f"{good[-1].images} pictures in one request (TTFT "
            f"{good[-1].ttft or good[-1].e2e:.0f} ms)"
            if good
            else "not even one picture"
        )
        failed = group[-1].failure
        why = (
            f"; {group[-1].images} fail: {failed.kind}, {failed.message[:300]}"
            if failed
            else "; no failure up to there"
        )
        lines.append(f"{resolution}: {most}{why}")
    return lines


def plot(steps: Sequence[ProbeStep]) -> bytes:
    """Plot TTFT by images per request as a PNG. A cross marks each resolution's first failure."""
    made, axis = plot_style.figure()
    for colour, resolution in zip(
        plot_style.COLOURS, dict.fromkeys(step.resolution for step in steps)
    ):
        group = [step for step in steps if step.resolution == resolution]
        good = [step for step in group if step.ttft is not None and step.failure is None]
        axis.plot(
            [s.images for s in good],
            [(s.ttft or 0) / 1e3 for s in good],
            color=colour,
            marker="o",
            markersize=3,
            label=resolution,
        )
        if group[-1].failure and good:
            axis.plot(
                [group[-1].images],
                [(good[-1].ttft or 0) / 1e3],
                color=colour,
                marker="x",
                markersize=9,
                markeredgewidth=2,
            )
    plot_style.label(
        axis,
        "Pictures in one request",
        "pictures (new ones each time; x: the first failure)",
        "TTFT (s)",
    )
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    plot_style.legend(axis)
    return plot_style.png(made)
