"""The command lines of the lab (`bench media`, `bench limits`, `make-checkpoint`, `simulate`),
which `saccade_bench/cli.py` and entry points mount.

Code that needs torch is imported when its command runs, so that `--help` is fast.
"""

# ruff: noqa: B008 (the defaults are frozen)

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App

from saccade_bench.cli import PLAIN, Flat
from saccade_bench.lab.options import (
    FleetOptions,
    LimitsOptions,
    MachineOptions,
    MediaBenchOptions,
    PresetName,
    SimulateOutput,
    TraceOptions,
)

simulation = App(name="simulate", default_parameter=PLAIN)
checkpoints = App(name="make-checkpoint", default_parameter=PLAIN)


def media(*, options: Annotated[MediaBenchOptions, Flat] = MediaBenchOptions()) -> None:
    """Measure CPU time and bytes of new and repeated images by stage, compared with a baseline."""
    from saccade_bench.lab.media import bench_media

    bench_media(options)


def limits(*, options: Annotated[LimitsOptions, Flat]) -> None:
    """Compare the CPU time of vision encoder, prompt and decode with this machine's limits."""
    from saccade_bench.lab.limits import bench_limits

    bench_limits(options)


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
    """Send a trace through the real caches and scheduler without tensors. Estimate its cost.

    Parameters
    ----------
    result
        A file written by `saccade bench serve --save-text --output-file`. The simulation replays
        its last run. Default: a random trace.
    """
    from saccade_bench.lab.simulator.command import simulate as run

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
    """Write a checkpoint folder from a preset, or quantize a model's weights.

    A preset's folder has a real architecture's configuration and a synthetic tokenizer. Large
    presets come without weights. Serve them with --tune load_format=dummy. Small and tiny presets
    come with random weights.

    Parameters
    ----------
    preset
        The architecture and its size.
    model
        A folder, a hub id, or "demo", instead of a preset. Requires --quantize.
    quantize
        fp8: quantizes the language model's matrices in 128 x 128 blocks, as in Qwen3-VL-*-FP8.
    out
        The folder to write. It must be new or empty.
    seed
        The seed for random weights.
    """
    from saccade.core.errors import ConfigError
    from saccade_bench.lab.checkpoint import make_checkpoint as write
    from saccade_bench.lab.checkpoint import make_folder

    if preset is not None and model is None and quantize is None:
        print(write(preset, out, seed=seed))
    elif preset is None and model is not None and quantize is not None:
        from saccade.core.model_folder import resolve_model
        from saccade_bench.lab.quantise import quantise_checkpoint

        make_folder(out)
        print(quantise_checkpoint(resolve_model(model), out))
    else:
        raise ConfigError(
            f"name either --preset, one of {', '.join(get_args(PresetName))}, or --model and "
            "--quantize"
        )
