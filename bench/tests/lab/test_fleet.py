"""The simulator beside two real servers behind `saccade route`: what it counts is what they
counted, whatever they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from saccade_bench.fixtures.server import Server, routing, serving
from saccade_bench.lab.calibrate import calibrate
from saccade_bench.lab.check import compare
from saccade_bench.lab.costs import PROFILES, Costs, Machine, Profile, load_profile
from saccade_bench.lab.options import FleetOptions, MachineOptions, Routing, Sharing
from saccade_bench.lab.outcome import Outcome
from saccade_bench.lab.replay import Replay
from saccade_bench.lab.simulate import one
from saccade_bench.load.serve import Bench
from saccade_bench.load.serve import serve as bench_serve
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    TargetOptions,
    TextOptions,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHATS, ROUNDS, ABREAST = 12, 4, 2
IMAGES = CHATS * ROUNDS
"""Each round of each chat shows a new one, and all before it again."""


@dataclass(frozen=True)
class Measured:
    """A run on real servers. `encoded_by`: images, by each of them."""

    trace: Replay
    profile: Profile
    names: tuple[str, ...]
    encoded_by: list[float]

    @property
    def encoded(self) -> float:
        return sum(self.encoded_by)

    def simulated(self, routing: Routing, sharing: Sharing, costs: Costs) -> Outcome:
        fleet = FleetOptions(workers=self.names, network_gbs=1.0)
        profile = replace(self.profile, costs=costs)
        return one(self.trace, "steps", profile, MachineOptions(), fleet, routing, sharing, quiet)


def quiet() -> None:
    pass


def measure(router: Server, workers: Sequence[Server], path: Path, seed: int) -> Measured:
    before = [worker.metric("saccade_images_encoded_total") for worker in workers]
    bench_serve(
        Bench(
            target=TargetOptions(base_url=router.url),
            load=LoadOptions(
                num_prompts=CHATS, max_concurrency=ABREAST, warmup_requests=0, seed=seed
            ),
            data=DatasetOptions(dataset_name="multiturn-image", rounds=ROUNDS),
            images=ImageOptions(image_resolution="random:96x96-480x320", image_content="blank"),
            text=TextOptions(random_input_len=20, random_output_len=7, disable_ignore_eos=True),
            output=OutputOptions(output_file=path, save_text=True, trace=True, quiet=True),
        )
    )
    after = [worker.metric("saccade_images_encoded_total") for worker in workers]
    encoded = [now - then for now, then in zip(after, before, strict=True)]
    names = tuple(worker.url for worker in workers[:2])
    trace = Replay(path, "demo", PROFILES["cpu"].machine)
    return Measured(trace, load_profile(MachineOptions(), trace.spec), names, encoded)


@contextmanager
def pair(logs: Path, *options: str) -> Iterator[tuple[ExitStack, list[Server]]]:
    with ExitStack() as stack:
        yield stack, [stack.enter_context(serving("demo", logs, *options)) for _ in range(2)]


@dataclass(frozen=True)
class Plain:
    """Two servers that share nothing, and costs that were fitted to a run on them."""

    logs: Path
    workers: list[Server]
    router: Server
    costs: Costs


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    logs = tmp_path_factory.mktemp("plain")
    with pair(logs) as (stack, workers):
        router = stack.enter_context(routing(workers, logs))
        fitted = measure(router, workers, logs / "fit.jsonl", 1)
        machine: Machine = fitted.profile.machine
        costs = calibrate(fitted.trace, machine, fitted.profile.costs, fitted.names)
        yield Plain(logs, workers, router, costs)


def test_with_affinity_each_server_encodes_as_simulated(plain: Plain) -> None:
    """Of every call as many tokens are found, too."""
    found = measure(plain.router, plain.workers, plain.logs / "run.jsonl", 2)
    outcome = found.simulated("affinity", "none", plain.costs)
    places = [served.replica for served in outcome.served]
    assert [places.count(place) for place in range(2)] == found.encoded_by, "a new one each round"
    assert outcome.counts.images_encoded == found.encoded == IMAGES
    assert compare(found.trace, outcome).exact
    told(found, outcome)


def test_without_anything_nearly_as_simulated(plain: Plain) -> None:
    """Not the same: two chances."""
    with routing(plain.workers, plain.logs, "--affinity", "none") as blind:
        found = measure(blind, plain.workers, plain.logs / "blind.jsonl", 3)
    outcome = found.simulated("random", "none", plain.costs)
    assert outcome.different == IMAGES
    assert found.encoded == pytest.approx(outcome.counts.images_encoded, rel=0.2)
    told(found, outcome)


def test_with_a_store_random_routing_encodes_once_as_simulated(
    plain: Plain, tmp_path: Path
) -> None:
    """But for an image whose chat goes on, elsewhere, before its embedding is written: nobody waits
    for a file.
    """
    store = ("--embedding-cache-shared", "--embedding-cache-dir", str(tmp_path / "store"))
    with pair(tmp_path, *store) as (stack, workers):
        blind = stack.enter_context(routing(workers, tmp_path, "--affinity", "none"))
        found = measure(blind, workers, tmp_path / "run.jsonl", 4)
    outcome = found.simulated("random", "store", plain.costs)
    assert outcome.counts.images_encoded - outcome.twice == IMAGES
    assert IMAGES <= found.encoded <= 1.1 * IMAGES
    told(found, outcome)


def test_with_an_encoder_random_routing_encodes_once_as_simulated(
    plain: Plain, tmp_path: Path
) -> None:
    with serving("demo", tmp_path, "--role", "encode") as encoder:
        options = ("--role", "language", "--encoders", encoder.url)
        with pair(tmp_path, *options) as (stack, workers):
            blind = stack.enter_context(routing(workers, tmp_path, "--affinity", "none"))
            found = measure(blind, [*workers, encoder], tmp_path / "run.jsonl", 5)
    outcome = found.simulated("random", "encoders", plain.costs)
    assert outcome.counts.images_encoded == found.encoded == IMAGES
    assert found.encoded_by == [0, 0, IMAGES]
    told(found, outcome)


def told(found: Measured, outcome: Outcome) -> None:
    check = compare(found.trace, outcome)
    measured = sum(line.ttft_measured * line.calls for line in check.rounds) / found.trace.requests
    print(
        f"\n{outcome.routing}, {outcome.sharing}: encodes per image measured "
        f"{found.encoded / IMAGES:.2f}, simulated {outcome.encodes:.2f}; TTFT measured "
        f"{measured:.0f} ms, simulated {outcome.ttft.mean:.0f} ({check.ttft_error:+.0%}); rounds: "
        + ", ".join(f"{line.ttft_measured:.0f}/{line.ttft:.0f}" for line in check.rounds)
    )
