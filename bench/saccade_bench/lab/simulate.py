"""`saccade simulate`: a trace through the real caches and scheduler without tensors, with an
estimate of its cost.

Owns the order of a simulation, and its output. Hits, encodes, bytes and evictions are counted by
the serving code; times come from the constants of `costs.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saccade.core.errors import ConfigError
from saccade.core.model_folder import resolve_model
from saccade.families.registry import load_spec
from saccade_bench.counted import counted
from saccade_bench.lab.costs import Profile, load_profile
from saccade_bench.lab.machine import make_room
from saccade_bench.lab.options import (
    FleetOptions,
    MachineOptions,
    Routing,
    SimulateOutput,
    TraceOptions,
)
from saccade_bench.lab.outcome import Outcome
from saccade_bench.lab.replay import Check, Replay, compare
from saccade_bench.lab.stepwise import Stepwise
from saccade_bench.lab.trace import RequestTrace, Synthetic

MIB = 1 << 20
ONE = FleetOptions()
PIPE_COLUMNS = 150
"""Of a table that goes to a file."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation. `pace`: requests simulated in a second of CPU time. `check`: for
    measured runs only.
    """

    profile: Profile
    outcomes: tuple[Outcome, ...]
    pace: float
    check: Check | None = None


def simulate(
    result: Path | None,
    wanted: TraceOptions,
    options: MachineOptions,
    output: SimulateOutput,
    fleet: FleetOptions = ONE,
) -> int:
    """Simulate, print and keep.

    Returns the exit status. Raises ConfigError where something cannot be.
    """
    console = Console(highlight=False, quiet=output.quiet)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    if result is None and output.check:
        raise ConfigError("--check needs a measured run: saccade simulate RESULT.jsonl")
    make_room(output, "output_file")
    simulated = run(result, wanted, options, fleet, quiet=output.quiet)
    console.print(_table(simulated))
    status = 0
    if simulated.check is not None and output.check:
        console.print(_checked(simulated.check))
        status = 0 if simulated.check.exact else 1
    if output.output_file:
        output.output_file.write_text(
            json.dumps(_json(simulated, wanted, options, fleet, result), indent=2) + "\n"
        )
    return status


def run(
    result: Path | None,
    wanted: TraceOptions,
    options: MachineOptions,
    fleet: FleetOptions = ONE,
    *,
    quiet: bool = False,
) -> Simulated:
    """Simulate every arrangement, and compare the first with a measured run."""
    model = options.model or ("demo" if result else None)
    profile = load_profile(options, None if model is None else load_spec(resolve_model(model)))
    trace: RequestTrace
    if result is not None:
        trace = Replay(result, model or "demo", profile.machine)
    else:
        trace = Synthetic(wanted, profile.machine)
    routings: tuple[Routing, ...] = ("affinity", "random") if len(fleet.names) > 1 else ("random",)
    routings = fleet.routing or routings
    requests = trace.requests * len(routings)
    began = time.process_time()
    with _progress(quiet, requests) as told:
        outcomes = tuple(
            Stepwise(trace, profile.machine, profile.costs, fleet.names, routing).run(told)
            for routing in routings
        )
    pace = requests / max(1e-9, time.process_time() - began)
    check = None if result is None else compare(trace, outcomes[0])
    return Simulated(profile, outcomes, pace, check)


@contextmanager
def _progress(quiet: bool, total: int) -> Iterator[Callable[[], None]]:
    with counted("simulating", total, quiet=quiet) as tell:
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            if done % 100 == 0:
                tell(done)

        yield told


# ---- for people


def _table(simulated: Simulated) -> Table:
    table = Table(
        title="ESTIMATE, nothing was measured: real scheduler and caches, step by step",
        caption=f"{simulated.pace:.0f} requests a second of one core were simulated.\n"
        f"Costs: {simulated.profile.source}",
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("", min_width=28)
    for outcome in simulated.outcomes:
        table.add_column(outcome.routing or "one replica", justify="right", no_wrap=True)
    columns = [dict(_rows(outcome)) for outcome in simulated.outcomes]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    counts, ttft = outcome.counts, outcome.ttft
    yield "Encodes per different picture", f"{outcome.encodes:.2f}"
    for which, ms in (("mean", ttft.mean), ("P50", ttft.median), ("P99", ttft.p99)):
        yield f"TTFT {which} (ms, estimate)", f"{ms:.0f}"
    mean = sum(outcome.busy) / len(outcome.busy)
    yield "Busy, mean / most (estimate)", f"{mean:.0%} / {max(outcome.busy):.0%}"
    yield "Requests / refused", f"{counts.requests} / {counts.refused}"
    yield "Prompt tokens", f"{counts.prompt_tokens}"
    yield "  found in the prefix cache", f"{outcome.kv_rate:.1%}"
    yield "Pictures sent / different", f"{counts.images} / {outcome.different}"
    for name, value in (
        ("prefix", counts.images_kv),
        ("embedding", counts.images_embedding),
        ("pixel", counts.pixels_reused),
    ):
        yield f"  whole in {name} cache", f"{value / max(1, counts.images):.1%}"
    yield "  encoded / decoded", f"{counts.images_encoded} / {counts.images_decoded}"
    for tier, found in outcome.tiers.items():
        asked = found.hits + found.misses
        yield f"Embeddings asked of {tier}", f"{asked}"
        yield f"  found on {tier}", f"{found.hits / max(1, asked):.1%}"
        yield f"  evicted from {tier}", f"{found.evictions}"
    for place, kept in outcome.page_tiers.items():
        share = kept.restored / max(1, counts.prompt_tokens)
        yield f"Prompt tokens back from {place}", f"{share:.1%}"
        yield f"  KV pages saved on / read from {place}", f"{kept.saved} / {kept.read}"
        yield f"  not read from {place}: too slow", f"{kept.slow}"
        yield f"  evicted from {place}'s KV", f"{kept.evictions}"
    yield "KV pages evicted / preempted", f"{counts.pages_evicted} / {counts.preemptions}"
    for way, nbytes in sorted(counts.moved.items()):
        yield f"MiB moved, {way}", f"{nbytes / MIB:.0f}"
    yield "Duration (s, estimate)", f"{outcome.duration / 1e3:.1f}"


def _checked(check: Check) -> Table:
    said = (
        "exactly as measured" if check.exact else f"{check.wrong} of {check.compared} calls differ"
    )
    if not check.exact:
        said += (
            ". Answers that had to go on past their end have tokens that show no text: measure "
            "with --disable-ignore-eos"
        )
    table = Table(
        title=f"Beside the measured run: cached tokens {said}",
        title_justify="left",
        title_style="bold",
    )
    for name in (
        "round",
        "calls",
        "cached tokens, measured",
        "simulated",
        "TTFT (ms), measured",
        "simulated",
        "error",
    ):
        table.add_column(name, justify="right")
    for line in check.rounds:
        cached = "not told" if line.cached_measured is None else f"{line.cached_measured}"
        times = f"{line.ttft_measured:.1f}", f"{line.ttft:.1f}", f"{line.ttft_error:+.0%}"
        table.add_row(f"{line.round}", f"{line.calls}", cached, f"{line.cached}", *times)
    table.caption = (
        f"TTFT: mean error {check.ttft_error:+.1%}, mean of the rounds' absolute errors "
        f"{check.rounds_error:.1%}"
    )
    if check.encoded is not None:
        table.caption += (
            f"\nPictures encoded: measured {check.encoded[0]}, simulated {check.encoded[1]}"
        )
    table.caption_justify = "left"
    return table


def _json(
    simulated: Simulated,
    wanted: TraceOptions,
    options: MachineOptions,
    fleet: FleetOptions,
    result: Path | None,
) -> dict[str, Any]:
    return {
        "kind": "estimate",
        "trace": asdict(wanted) if result is None else result.name,
        "machine": _plain(asdict(options)),
        "fleet": _plain(asdict(fleet)),
        "source": simulated.profile.source,
        "costs": asdict(simulated.profile.costs),
        "outcomes": [_plain(asdict(replace(outcome, served=()))) for outcome in simulated.outcomes],
        "check": None if simulated.check is None else _plain(asdict(simulated.check)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.name if isinstance(value, Path) else value
