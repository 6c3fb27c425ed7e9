"""The command lines of the lab: `bench media`, `bench encoder`, `make-checkpoint`,
`simulate`, for `saccade_bench/cli.py` and entry points to mount.

Owns nothing but names; what needs torch is imported when called, so that `--help` stays quick.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App

from saccade_bench.cli import PLAIN, Flat
from saccade_bench.lab.options import (
    EncoderBenchOptions,
    FleetOptions,
    MachineOptions,
    MediaBenchOptions,
    PresetName,
    SimulateOutput,
    TraceOptions,
)

simulation = App(name="simulate", default_parameter=PLAIN)
checkpoints = App(name="make-checkpoint", default_parameter=PLAIN)


def media(*, options: Annotated[MediaBenchOptions, Flat] = MediaBenchOptions()) -> None:
    """CPU time and bytes of a new and a seen image, stage by stage, beside the usual way."""
    from saccade_bench.lab.media import bench_media

    bench_media(options)


def encoder(*, options: Annotated[EncoderBenchOptions, Flat] = EncoderBenchOptions()) -> None:
    """Images per second of the vision tower, beside transformers' tower on the same weights."""
    from saccade_bench.lab.encoder import bench_encoder

    bench_encoder(options)


@simulation.default
def simulate(
    result: Path | None = None,
    /,
    *,
    trace: Annotated[TraceOptions, Flat] = TraceOptions(),
    machine: Annotated[MachineOptions, Flat] = MachineOptions(),
    fleet: Annotated[FleetOptions, Flat] = FleetOptions(),
    output: Annotated[SimulateOutput, Flat] = SimulateOutput(),
) -> int:
    """Send a trace through the real caches and scheduler, without tensors, and estimate what it
    would take.

    Parameters
    ----------
    result
        A file that `saccade bench serve --save-text --output-file` wrote: its last run is replayed.
        Derived: a drawn trace.
    """
    from saccade_bench.lab.simulate import simulate as run

    return run(result, trace, machine, output, fleet)


@checkpoints.default
def make_checkpoint(
    *,
    preset: PresetName | None = None,
    model: str | None = None,
    quantize: Literal["fp8"] | None = None,
    out: Path,
    seed: int = 0,
) -> None:
    """Write a folder with the configuration of a real architecture and a synthetic tokenizer; or a
    model's weights, quantised.

    Large presets come without weights: serve them with --tune load_format=dummy. Small and tiny
    ones come with random weights.

    Parameters
    ----------
    preset
        The architecture and its size.
    model
        In place of a preset: a folder, a hub id, or "demo"; together with --quantize.
    quantize
        fp8: matrices of the language model by blocks of 128 x 128, as in Qwen3-VL-*-FP8.
    out
        The folder to write: a new or an empty one.
    seed
        Decides the weights.
    """
    from saccade.core.errors import ConfigError
    from saccade_bench.lab.checkpoint import make_checkpoint as write
    from saccade_bench.lab.checkpoint import make_folder

    if preset is not None and model is None and quantize is None:
        print(write(preset, out, seed=seed))
    elif preset is None and model is not None and quantize is not None:
        from saccade.families.checkpoint import resolve_model
        from saccade_bench.lab.quantise import quantise_checkpoint

        make_folder(out)
        print(quantise_checkpoint(resolve_model(model), out))
    else:
        raise ConfigError(
            f"name either --preset, one of {', '.join(get_args(PresetName))}, or --model and "
            "--quantize"
        )
