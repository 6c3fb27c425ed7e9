"""The command lines of the lab: `bench media`, `bench encoder`, `bench kernels`, `bench eviction`, `make-checkpoint`, `simulate`, for the
main program to mount.

Owns nothing but names; what needs torch is imported when called, so that `--help` stays quick.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App

from saccade.lab.options import (
    EncoderBenchOptions,
    EvictionOptions,
    KernelBenchOptions,
    MachineOptions,
    MediaBenchOptions,
    PresetName,
    SimulateOutput,
    TraceOptions,
)
from saccade.tools.cli import PLAIN, Flat, bench

checkpoint = App(name="make-checkpoint", help="Make a model folder to measure with.", default_parameter=PLAIN)
simulation = App(name="simulate", help="Estimate hits, bytes and times without a model.", default_parameter=PLAIN)


@bench.command
def media(*, options: Annotated[MediaBenchOptions, Flat] = MediaBenchOptions()) -> None:
    """What a new and a seen picture cost in CPU time and bytes, stage by stage, beside the usual way."""
    from saccade.lab.media import bench_media

    bench_media(options)


@bench.command
def encoder(*, options: Annotated[EncoderBenchOptions, Flat] = EncoderBenchOptions()) -> None:
    """How many pictures a second the vision tower encodes, beside transformers' tower on the same weights."""
    from saccade.lab.encoder import bench_encoder

    bench_encoder(options)


@bench.command
def kernels(*, options: Annotated[KernelBenchOptions, Flat] = KernelBenchOptions()) -> None:
    """Memory speed of the rotary embedding, and what a picture's positions cost, beside transformers' ways."""
    from saccade.lab.kernels import bench_kernels

    bench_kernels(options)


@bench.command
def eviction(*, options: Annotated[EvictionOptions, Flat] = EvictionOptions()) -> None:
    """Which eviction policy of embeddings finds the most pictures, and saves the most encoding, on drawn traces."""
    from saccade.lab.eviction import bench_eviction

    bench_eviction(options)


@simulation.default
def simulate(
    result: Path | None = None,
    /,
    *,
    trace: Annotated[TraceOptions, Flat] = TraceOptions(),
    machine: Annotated[MachineOptions, Flat] = MachineOptions(),
    output: Annotated[SimulateOutput, Flat] = SimulateOutput(),
) -> int:
    """Send a trace through the real caches and scheduler, without tensors, and estimate what it would take.

    Parameters
    ----------
    result
        A file that `saccade bench serve --save-text --output-file` wrote: its last run is replayed. Derived: a drawn trace.
    """
    from saccade.lab.simulate import simulate as run

    return run(result, trace, machine, output)


@checkpoint.default
def make(*, preset: PresetName, out: Path, seed: int = 0) -> None:
    """Write a folder with the configuration of a real architecture and a synthetic tokenizer.

    Large presets come without weights: serve them with --load-format dummy. Small and tiny ones come with random weights.

    Parameters
    ----------
    preset
        The architecture and its size.
    out
        The folder to write: a new or an empty one.
    seed
        Decides the weights.
    """
    from saccade.lab.checkpoint import make_checkpoint

    print(make_checkpoint(preset, out, seed=seed))
