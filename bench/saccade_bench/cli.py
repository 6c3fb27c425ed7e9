"""The command lines of `saccade bench`, `eval`, `probe` and `prove`, which entry points add to
`saccade`.

Options are dataclasses. The code of a command is imported when it runs, so that `--help` is fast.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from saccade_bench.options import (
    AbOptions,
    DatasetOptions,
    EvalName,
    EvalOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    PastedOptions,
    ProbeOptions,
    ProveOptions,
    PublishedOptions,
    RandomMM,
    ReportOptions,
    TargetOptions,
    TextOptions,
)

Flat = Parameter(name="*")

PLAIN = Parameter(negative="", consume_multiple=True)

bench = App(
    name="bench", help="Measure a server and compare measurements.", default_parameter=PLAIN
)
probe = App(
    name="probe",
    help="Find how many images one request may hold before a server fails.",
    default_parameter=PLAIN,
)
proof = App(
    name="prove",
    help="Check whether a server mixes up images that a cache might confuse.",
    default_parameter=PLAIN,
)
evaluation = App(
    name="eval", help="Measure the accuracy of a model behind a server.", default_parameter=PLAIN
)
for name, what in (
    ("media", "Measure CPU time and bytes of new and seen images, stage by stage."),
    ("limits", "Show which share of a CPU's limit the tower, a prompt and decode reach."),
):
    bench.command(f"saccade_bench.lab.cli:{name}", name=name, help=what, default_parameter=PLAIN)


@bench.command
def serve(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    data: Annotated[DatasetOptions, Flat] = DatasetOptions(),
    images: Annotated[ImageOptions, Flat] = ImageOptions(),
    text: Annotated[TextOptions, Flat] = TextOptions(),
    random_mm: Annotated[RandomMM, Flat] = RandomMM(),
    output: Annotated[OutputOptions, Flat] = OutputOptions(),
    pasted: Annotated[PastedOptions, Flat] = PastedOptions(),
) -> int:
    """Send a workload to an OpenAI-compatible server and print throughput and latencies.

    Takes the options of sglang.bench_serving and of vllm bench serve as they are. The
    status is 1 if every request failed.
    """
    from saccade_bench.load.serve import Bench
    from saccade_bench.load.serve import serve as run

    measured = run(Bench(target, load, data, images, text, random_mm, output, pasted))
    return 0 if measured.summary.completed else 1


@bench.command
def report(*results: Path, options: Annotated[ReportOptions, Flat] = ReportOptions()) -> None:
    """Turn result files into one HTML page and PNGs.

    Parameters
    ----------
    results
        Files written by `bench serve --output-file` or `bench ab`. Runs with the same label count
        as repeats. Different labels are compared.
    """
    from saccade_bench.report.report import report as run

    print(run(results, options))


@bench.command
def ab(
    *,
    servers: Annotated[AbOptions, Flat],
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    data: Annotated[DatasetOptions, Flat] = DatasetOptions(),
    images: Annotated[ImageOptions, Flat] = ImageOptions(),
    text: Annotated[TextOptions, Flat] = TextOptions(),
    random_mm: Annotated[RandomMM, Flat] = RandomMM(),
    output: Annotated[OutputOptions, Flat] = OutputOptions(),
) -> None:
    """Start two servers in turns, measure their speed and accuracy, and report the differences.

    saccade bench ab --a "saccade serve DIR --port {port}" --b "saccade serve DIR --port {port}
    --tune disable_radix_cache=true"
    """
    from saccade_bench.ab import ab as run
    from saccade_bench.load.serve import Bench

    run(servers, Bench(TargetOptions(), load, data, images, text, random_mm, output))


@bench.command
def published(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[PublishedOptions, Flat] = PublishedOptions(),
) -> int:
    """Run the commands behind published figures and print both, with a mechanism and without.

    saccade bench published --server "saccade serve DIR --port {port}". The status is 1 if nothing
    could be measured.
    """
    from saccade_bench.published.run import published as run

    return int(not any(each.on.figures for each in run(target, options, parsed)))


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line (without `saccade`) into the arguments of its command's function."""
    app = {"bench": bench, "probe": probe, "eval": evaluation}[words[0]]
    _, bound, _ = app.parse_args(list(words[1:]), exit_on_error=False, print_error=False)
    return dict(bound.arguments)


@probe.default
def run_probe(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[ProbeOptions, Flat] = ProbeOptions(),
) -> None:
    """Send requests with 1, 2, 3 ... new images until one fails. Repeat for each resolution."""
    from saccade_bench.probe import probe as run

    run(target, options)


@proof.default
def run_prove(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[ProveOptions, Flat] = ProveOptions(),
) -> int:
    """Send twin images that differ in one detail. Each must get its own answer. The status is 1 if
    the server mixed any up.
    """
    from saccade.core.errors import ConfigError
    from saccade_bench.load.client import headers
    from saccade_bench.load.workload import parse_extra
    from saccade_bench.prove.options import ProveError
    from saccade_bench.prove.run import TIMEOUT, ProvedServer
    from saccade_bench.prove.run import prove as run

    extra = parse_extra(target.extra_request_body)
    timeout = target.timeout or TIMEOUT
    try:
        proof = run(
            ProvedServer(target.url, target.model, headers(target), timeout, extra), options
        )
    except ProveError as error:
        raise ConfigError(str(error)) from None
    return bool(proof.mixed_up or proof.unlike_cold)


@evaluation.default
def run_eval(
    name: EvalName,
    /,
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[EvalOptions, Flat] = EvalOptions(),
) -> None:
    """Ask known questions and score the answers.

    Parameters
    ----------
    name
        ocr: drawn words and numbers. shapes: colours, shapes, counts, several images. ocrbench,
        mmmu: the published sets and rules.
        consistency: asks the same questions cold, warm, batched and next to long prompts, and
        checks that the answers agree.
    """
    from saccade_bench.eval.run import evaluate

    evaluate(name, target, options)
