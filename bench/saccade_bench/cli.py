"""The command lines of `saccade bench`, `eval`, `probe` and `prove`. Entry points join them to
`saccade`.

Owns nothing but names: options come from dataclasses, work is done elsewhere and imported when
called, so that `--help` stays quick.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from saccade_bench.options import (
    AbOptions,
    DatasetOptions,
    EvalName,
    EvalOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    ProbeOptions,
    ProveOptions,
    RandomMM,
    ReportOptions,
    TargetOptions,
    TextOptions,
)

Flat = Parameter(name="*")

PLAIN = Parameter(negative="", consume_multiple=True)

bench = App(
    name="bench", help="Measure a server, and compare measurements.", default_parameter=PLAIN
)
probe = App(
    name="probe",
    help="Find how many pictures one request may have before a server fails.",
    default_parameter=PLAIN,
)
proof = App(
    name="prove",
    help="Find out whether a server mixes up images that a cache might take for one another.",
    default_parameter=PLAIN,
)
evaluation = App(
    name="eval", help="Measure the accuracy of a model behind a server.", default_parameter=PLAIN
)
for name, what in (
    ("media", "What a new and a seen image cost in CPU time and bytes, stage by stage."),
    ("encoder", "How many images a second the vision tower encodes."),
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
) -> int:
    """Send a workload to an OpenAI-compatible server and print throughput and latencies.

    Ends with status 1 if every request failed.
    """
    from saccade_bench.load.serve import Bench
    from saccade_bench.load.serve import serve as run

    return (
        0
        if run(Bench(target, load, data, images, text, random_mm, output)).summary.completed
        else 1
    )


@bench.command
def report(*results: Path, options: Annotated[ReportOptions, Flat] = ReportOptions()) -> None:
    """Make one HTML page, and PNGs, of result files.

    Parameters
    ----------
    results
        Files written by `bench serve --output-file` or `bench ab`. Runs with the same label are
        repeats; other labels are compared.
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
    """Start two servers in turns, measure speed and accuracy of both, and say which differ.

    saccade bench ab --a "saccade serve DIR --port {port}" --b "saccade serve DIR --port {port}
    --tune disable_radix_cache=true"
    """
    from saccade_bench.ab import ab as run
    from saccade_bench.load.serve import Bench

    run(servers, Bench(TargetOptions(), load, data, images, text, random_mm, output))


@probe.default
def run_probe(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[ProbeOptions, Flat] = ProbeOptions(),
) -> None:
    """Send requests of 1, 2, 3 ... new pictures, for each resolution, up to the first failure."""
    from saccade_bench.probe import probe as run

    run(target, options)


@proof.default
def run_prove(
    *,
    target: Annotated[TargetOptions, Flat] = TargetOptions(),
    options: Annotated[ProveOptions, Flat] = ProveOptions(),
) -> int:
    """Send twins: images that differ in one thing, and must have answers of their own. The status
    is 1 if any were mixed up.
    """
    from saccade_bench.prove.run import prove as run

    return bool(run(target, options).mixed_up)


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
        ocr: drawn words and numbers. shapes: colours, shapes, counts, several pictures. ocrbench,
        mmmu: the published sets and rules.
        consistency: the same questions cold, warm, batched, beside long prompts: are the answers
        the same?
    """
    from saccade_bench.eval.run import evaluate

    evaluate(name, target, options)
