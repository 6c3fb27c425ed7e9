"""The simulator counts what two real servers behind `saccade route` count."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from saccade_bench.fixtures.server import Server, routing, serving
from saccade_bench.lab.options import MachineOptions, Routing
from saccade_bench.lab.simulator.command import compare
from saccade_bench.lab.simulator.costs import PROFILES, Profile, load_profile
from saccade_bench.lab.simulator.fleet import Outcome, Simulation
from saccade_bench.lab.simulator.traces import Replay
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
"""Each round of each chat adds a new image, and repeats all earlier ones."""


@dataclass(frozen=True)
class Measured:
    """Measurements of real servers. `encoded_by`: number of images that each server encoded."""

    trace: Replay
    profile: Profile
    names: tuple[str, ...]
    encoded_by: list[float]

    @property
    def encoded(self) -> float:
        return sum(self.encoded_by)

    def simulated(self, routing: Routing) -> Outcome:
        profile = self.profile
        return Simulation(self.trace, profile.machine, profile.costs, self.names, routing).run()


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


def test_with_affinity_each_server_encodes_as_simulated(tmp_path: Path) -> None:
    """The number of cached tokens of each call is the same too."""
    with ExitStack() as stack:
        workers = [stack.enter_context(serving("demo", tmp_path)) for _ in range(2)]
        router = stack.enter_context(routing(workers, tmp_path))
        found = measure(router, workers, tmp_path / "run.jsonl", 2)
    outcome = found.simulated("affinity")
    places = [served.replica for served in outcome.served]
    assert [places.count(place) for place in range(2)] == found.encoded_by, "a new one each round"
    assert outcome.counts["images_encoded"] == found.encoded == IMAGES
    assert compare(found.trace, outcome).wrong == 0
    told(found, outcome)


def told(found: Measured, outcome: Outcome) -> None:
    check = compare(found.trace, outcome)
    measured = sum(line.ttft_measured * line.calls for line in check.rounds) / found.trace.requests
    print(
        f"\n{outcome.routing}: encodes per image measured "
        f"{found.encoded / IMAGES:.2f}, simulated {outcome.encodes:.2f}; TTFT measured "
        f"{measured:.0f} ms, simulated {outcome.ttft.mean:.0f} ({check.ttft_error:+.0%}); rounds: "
        + ", ".join(f"{line.ttft_measured:.0f}/{line.ttft:.0f}" for line in check.rounds)
    )
