"""`saccade simulate`: run a trace through the real caches and scheduler without tensors, and
estimate its cost. A replayed run is compared with its measurements.

Hits, encodes, bytes and evictions are counted by the serving code. Times are estimated from the
constants in `costs.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from saccade.core.errors import ConfigError
from saccade.core.model_folder import resolve_model
from saccade.families.registry import load_spec
from saccade_bench.counted import counted
from saccade_bench.lab.machine import make_room
from saccade_bench.lab.options import (
    FleetOptions,
    MachineOptions,
    Routing,
    SimulateOutput,
    TraceOptions,
)
from saccade_bench.lab.simulator.costs import MIB, Profile, load_profile
from saccade_bench.lab.simulator.fleet import Outcome, Simulation
from saccade_bench.lab.simulator.traces import Replay, RequestTrace, Synthetic

PIPE_COLUMNS = 150
"""Width of a table that is written to a file or a pipe."""


def simulate(
    result: Path | None,
    wanted: TraceOptions,
    options: MachineOptions,
    output: SimulateOutput,
    fleet: FleetOptions = FleetOptions(),  # noqa: B008 (frozen)
) -> int:
    """Simulate every routing policy, compare the first with a measured run, and print the results.

    Returns the exit status. Raises ConfigError.
    """
    console = Console(highlight=False, quiet=output.quiet)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    if result is None and output.check:
        raise ConfigError("--check needs a measured run: saccade simulate RESULT.jsonl")
    make_room(output, "output_file")
    model = options.model or ("demo" if result else None)
    profile = load_profile(options, None if model is None else load_spec(resolve_model(model)))
    trace: RequestTrace = (
        Synthetic(wanted, profile.machine)
        if result is None
        else Replay(result, model or "demo", profile.machine)
    )
    outcomes, pace = _run(trace, profile, fleet, quiet=output.quiet)
    console.print(_table(profile, outcomes, pace))
    check = None if result is None else compare(trace, outcomes[0])
    if check is not None and output.check:
        console.print(_checked(check))
    if output.output_file:
        data = {
            "kind": "estimate",
            "trace": wanted if result is None else result.name,
            "machine": options,
            "fleet": fleet,
            "source": profile.source,
            "costs": msgspec.structs.asdict(profile.costs),
            "outcomes": [_outcome(outcome) for outcome in outcomes],
            "check": check,
        }
        output.output_file.write_text(json.dumps(_plain(data), indent=2) + "\n")
    return int(check is not None and output.check and check.wrong > 0)


def _run(
    trace: RequestTrace, profile: Profile, fleet: FleetOptions, *, quiet: bool
) -> tuple[list[Outcome], float]:
    """Return the outcome of each routing policy, and the simulated requests per CPU second."""
    routings: tuple[Routing, ...] = ("affinity", "random") if len(fleet.names) > 1 else ("random",)
    routings = fleet.routing or routings
    requests, done = trace.requests * len(routings), 0
    began = time.process_time()
    with counted("simulating", requests, quiet=quiet) as tell:

        def on_end() -> None:
            nonlocal done
            done += 1
            if done % 100 == 0:
                tell(done)

        outcomes = [
            Simulation(trace, profile.machine, profile.costs, fleet.names, routing, on_end).run()
            for routing in routings
        ]
    return outcomes, requests / max(1e-9, time.process_time() - began)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = _plain(replace(outcome, served=()))
    data["counts"]["moved"] = data.pop("moved")
    return data


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.name if isinstance(value, Path) else value


# ---- comparison with the measured run


@dataclass(frozen=True, slots=True)
class RoundCheck:
    """One round of all chats, as measured and as simulated."""

    round: int
    calls: int
    cached_measured: int | None  # sum; None if the server does not report it
    cached: int
    ttft_measured: float  # mean, ms
    ttft: float

    @property
    def ttft_error(self) -> float:
        return self.ttft / self.ttft_measured - 1


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison with a measured run.

    For `wrong` of the `compared` calls, the simulated number of cached tokens differs from the
    measured one. `encoded` is the measured and the simulated number of encoded images, if the run
    has a trace.
    """

    compared: int
    wrong: int
    rounds: tuple[RoundCheck, ...]
    encoded: tuple[int, int] | None

    @property
    def ttft_error(self) -> float:
        """Relative error of the mean TTFT over all calls."""
        measured = sum(line.ttft_measured * line.calls for line in self.rounds)
        return sum(line.ttft * line.calls for line in self.rounds) / measured - 1

    @property
    def rounds_error(self) -> float:
        return sum(abs(line.ttft_error) for line in self.rounds) / len(self.rounds)


def compare(trace: RequestTrace, outcome: Outcome) -> Check:
    """Compare `outcome` with a measured trace."""
    pairs = [
        (served, measured)
        for served in outcome.served
        if (measured := trace.call(served.session, served.round).measured)
    ]
    rounds = []
    for number in sorted({served.round for served, _ in pairs}):
        those = [pair for pair in pairs if pair[0].round == number]
        reported = [measured.cached_tokens for _, measured in those]
        known = [tokens for tokens in reported if tokens is not None]
        rounds.append(
            RoundCheck(
                round=number + 1,
                calls=len(those),
                cached_measured=sum(known) if len(known) == len(those) else None,
                cached=sum(served.cached_tokens for served, _ in those),
                ttft_measured=sum(measured.ttft for _, measured in those) / len(those),
                ttft=sum(served.ttft for served, _ in those) / len(those),
            )
        )
    comparable = [pair for pair in pairs if pair[1].cached_tokens is not None]
    encoded = [measured.encoded for _, measured in pairs if measured.encoded is not None]
    return Check(
        compared=len(comparable),
        wrong=sum(
            served.cached_tokens != measured.cached_tokens for served, measured in comparable
        ),
        rounds=tuple(rounds),
        encoded=(sum(encoded), outcome.counts["images_encoded"]) if encoded else None,
    )


# ---- printed output


def _table(profile: Profile, outcomes: Sequence[Outcome], pace: float) -> Table:
    table = Table(
        title="ESTIMATE, nothing was measured: real scheduler and caches, step by step",
        caption=f"{pace:.0f} requests a second of one core were simulated.\n"
        f"Costs: {profile.source}",
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("", min_width=28)
    for outcome in outcomes:
        table.add_column(outcome.routing or "one replica", justify="right", no_wrap=True)
    columns = [dict(_rows(outcome)) for outcome in outcomes]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    counts, ttft = outcome.counts, outcome.ttft
    prompt_tokens, images = max(1, counts["prompt_tokens"]), max(1, counts["images"])
    yield "Encodes per different picture", f"{outcome.encodes:.2f}"
    for which, ms in (("mean", ttft.mean), ("P50", ttft.median), ("P99", ttft.p99)):
        yield f"TTFT {which} (ms, estimate)", f"{ms:.0f}"
    mean = sum(outcome.busy) / len(outcome.busy)
    yield "Busy, mean / most (estimate)", f"{mean:.0%} / {max(outcome.busy):.0%}"
    yield "Requests / refused", f"{counts['requests']} / {counts['refused']}"
    yield "Prompt tokens", f"{counts['prompt_tokens']}"
    yield "  found in the prefix cache", f"{counts['cached_tokens'] / prompt_tokens:.1%}"
    yield "Pictures sent / different", f"{counts['images']} / {outcome.different}"
    for name, count in (
        ("prefix", "images_kv"),
        ("embedding", "images_embedding"),
        ("pixel", "pixels_reused"),
    ):
        yield f"  whole in {name} cache", f"{counts[count] / images:.1%}"
    yield "  encoded / decoded", f"{counts['images_encoded']} / {counts['images_decoded']}"
    for tier, found in outcome.tiers.items():
        asked = found["hits"] + found["misses"]
        yield f"Embeddings asked of {tier}", f"{asked}"
        yield f"  found on {tier}", f"{found['hits'] / max(1, asked):.1%}"
        yield f"  evicted from {tier}", f"{found['evictions']}"
    for tier, pages in outcome.page_tiers.items():
        yield f"Prompt tokens back from {tier}", f"{pages['restored'] / prompt_tokens:.1%}"
        yield f"  KV pages saved on / read from {tier}", f"{pages['saved']} / {pages['read']}"
        yield f"  not read from {tier}: too slow", f"{pages['slow']}"
        yield f"  evicted from {tier}'s KV", f"{pages['evictions']}"
    yield "KV pages evicted / preempted", f"{counts['pages_evicted']} / {counts['preemptions']}"
    for way, nbytes in sorted(outcome.moved.items()):
        yield f"MiB moved, {way}", f"{nbytes / MIB:.0f}"
    yield "Duration (s, estimate)", f"{outcome.duration / 1e3:.1f}"


def _checked(check: Check) -> Table:
    said = "exactly as measured"
    if check.wrong:
        said = (
            f"{check.wrong} of {check.compared} calls differ. Answers that had to go on past their "
            "end have tokens that show no text: measure with --disable-ignore-eos"
        )
    table = Table(
        title=f"Beside the measured run: cached tokens {said}",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    measured, simulated = ("cached tokens, measured", "TTFT (ms), measured"), "simulated"
    for name in ("round", "calls", measured[0], simulated, measured[1], simulated, "error"):
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
    return table
