"""The command lines of the tools: `bench`, `probe`, `eval`, for the main program to mount.

Owns nothing but names: options come from dataclasses, work is done elsewhere and imported when called, so that `--help` stays quick.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from saccade.tools.bench.options import DatasetOptions, Load, OutputOptions, PictureOptions, RandomMM, Target, TextOptions

Flat = Parameter(name="*")

bench = App(
    name="bench", help="Measure a server, and compare measurements.", default_parameter=Parameter(negative="", consume_multiple=True)
)


@bench.command
def serve(
    *,
    target: Annotated[Target, Flat] = Target(),
    load: Annotated[Load, Flat] = Load(),
    data: Annotated[DatasetOptions, Flat] = DatasetOptions(),
    pictures: Annotated[PictureOptions, Flat] = PictureOptions(),
    text: Annotated[TextOptions, Flat] = TextOptions(),
    random_mm: Annotated[RandomMM, Flat] = RandomMM(),
    output: Annotated[OutputOptions, Flat] = OutputOptions(),
) -> None:
    """Send a workload to an OpenAI-compatible server and print throughput and latencies."""
    from saccade.tools.bench.serve import Bench
    from saccade.tools.bench.serve import serve as run

    run(Bench(target, load, data, pictures, text, random_mm, output))


if __name__ == "__main__":
    bench()
