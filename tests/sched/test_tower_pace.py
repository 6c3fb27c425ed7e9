"""The tower's part of a step follows the pauses that rows which decode have beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from saccade.core.plan import Plan, Row
from saccade.engine.process import build_scheduler
from saccade.families.registry import load_spec
from saccade.sched.images.tower_pace import LEAST_PART, LONGEST_PAUSE, TowerPace
from saccade.sched.limits import SchedulerLimits
from saccade_bench.fixtures.harness import CONFIG
from tests.sched.simulator import Simulation, picture
from tests.sched.test_scheduler import image_request

BEGUN = 10_000
MOST = 270_000
STEP = 7e-3


@dataclass
class Device:
    """Steps of rows that decode take a little more or less than `STEP`, a patch-block beside them
    `per_block` seconds.
    """

    per_block: float
    time: float = 100.0
    pace: TowerPace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = TowerPace(BEGUN, MOST, lambda: self.time)
        self._noise = np.random.default_rng(1)

    def step(self, tower: int = 0, rows: int = 8, length: int = 1, encoding: bool = False) -> float:
        """What it took, in steps without an image."""
        begun = self.time
        usual = STEP * (1 + math.log2(rows) / 8) * length
        took = usual * self._noise.lognormal(0, 0.05) + tower * self.per_block
        self.time += took
        row = tuple(Row(slot, 5, length, (), sample=True) for slot in range(rows))
        self.pace.ended(plan(row, tower), begun, encoding or tower > 0)
        return took / usual

    def beside(self, steps: int) -> list[float]:
        return [self.step(self.pace.tower_budget) for _ in range(steps)]


def plan(rows: tuple[Row, ...], tower: int) -> Plan:
    return Plan(1, tower=tower, rows=rows)


@pytest.mark.first
@pytest.mark.parametrize("per_block", [4e-6, 7e-7, 1e-7, 2e-8], ids=["7 steps", "2", "1.1", "1"])
def test_one_pause_in_a_hundred_is_longer_than_two_steps(per_block: float) -> None:
    """Whatever the tower takes beside a step at first; and no less of an image is encoded than a
    step has room for.
    """
    device = Device(per_block)
    for _ in range(50):
        device.step()
    device.beside(4000)
    pauses = device.beside(4000)
    assert np.mean(np.array(pauses) > LONGEST_PAUSE) < 0.02
    room = min(MOST, STEP * 1.375 / per_block)
    assert 0.6 * room < device.pace.tower_budget <= 1.05 * room


def test_a_part_that_is_too_long_is_soon_short() -> None:
    device = Device(4e-6)
    for _ in range(50):
        device.step()
    assert device.step(device.pace.tower_budget) > 4
    device.beside(10)
    assert device.step(device.pace.tower_budget) < 2.1


def test_a_tower_that_is_ever_too_slow_keeps_the_least_part() -> None:
    device = Device(1.0)
    for _ in range(50):
        device.step()
    device.beside(100)
    assert device.pace.tower_budget == BEGUN // LEAST_PART


def test_only_steps_of_as_many_rows_are_compared() -> None:
    device = Device(1e-8)
    for _ in range(50):
        device.step(rows=1)
    for _ in range(100):
        device.step(BEGUN, rows=64)
    assert device.pace.tower_budget == BEGUN, "nobody knows what a step of 64 rows takes"


def test_prompts_idle_times_and_encodings_under_way_are_no_measure() -> None:
    device = Device(1e-7)
    for _ in range(50):
        device.step()
    for _ in range(100):
        device.step(length=512)  # were it alone's measure, a pause could be 1000 times as long
        device.step(BEGUN, length=512)
        device.step(encoding=True)
        device.time += 60  # nobody asks for anything
    assert device.pace.tower_budget == BEGUN
    device.pace.ended(plan((), 5), device.time - 1, True)
    assert device.pace.tower_budget == BEGUN


def test_plans_take_what_the_pace_allows() -> None:
    """Of a scheduler whose steps take three times as long beside an image."""
    passed = 0.0
    limits = SchedulerLimits(
        8, 512, 1000, 10_000, tower_budget=400, tower_blocks=24, tower_shares=False
    )
    pace = TowerPace(400, 10_000, lambda: time.monotonic() + passed)
    sim = Simulation(limits, 256, 4, pace=pace)
    sim.add(sim.request([1, 2, 3], ignore_eos=True, max_tokens=500))
    taken: list[int] = []

    def step() -> None:
        nonlocal passed
        made = sim.plan()
        passed += 3000 if made.tower else 1000  # beside which the test's own time is nothing
        sim.finish(made)
        taken.extend([made.tower] if made.tower else [])

    for _ in range(10):
        step()
    image = picture(1, 100)
    sim.add(image_request(sim, image))
    sim.send_pixels(image.key)
    for _ in range(30):
        step()
    assert taken[:4] == [400, 320, 256, 205]
    assert min(taken) == 400 // LEAST_PART


@pytest.mark.parametrize("pairs", [1, 40, pytest.param(384, marks=pytest.mark.slow)])
def test_new_pairs_hold_up_no_stream_by_more_than_a_part_of_an_image(pairs: int) -> None:
    """However many a request has: while they are encoded and prefilled, each step has a token of
    each stream, and beside these no more than one budget of the tower and one chunk of a prompt.
    """
    budget, chunk, streams = 400, 64, 4
    limits = SchedulerLimits(
        8, chunk, 20_000, 10_000, tower_budget=budget, tower_blocks=24, tower_shares=False
    )
    sim = Simulation(limits, 3000, 16, embedding_tokens=pairs * 20)
    for _ in range(streams):
        sim.add(sim.request([1, 2, 3], ignore_eos=True, max_tokens=4000))
    while sim.scheduler.counts.steps < 10:
        sim.finish(sim.plan())
    images = [picture(number, 20) for number in range(pairs)]
    video = sim.add(image_request(sim, *images))
    towers, prompts = [], []
    while video in sim.alive:
        for key in list(sim.wanted):
            sim.send_pixels(key)
        made = sim.plan()
        drawn = [row for row in made.rows if row.sample and row.length == 1]
        assert len(drawn) >= streams, "a step without a token of each stream"
        towers.append(made.tower)
        prompts.append(sum(row.length for row in made.rows) - streams)
        sim.finish(made)
    assert sim.scheduler.counts.images_encoded == pairs
    assert 0 < max(towers) <= budget and max(prompts) <= chunk
    work = pairs * images[0].num_patches * limits.tower_blocks
    assert len(towers) >= work / budget, "the rest comes in later steps"


@pytest.mark.parametrize(
    ("device", "paced", "adapts"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_accelerators_adapt_and_cpus_do_not(
    checkpoint: Callable[..., Path], device: Literal["cpu", "cuda"], paced: bool, adapts: bool
) -> None:
    spec = load_spec(checkpoint("qwen3_vl"))
    config = replace(CONFIG, device=device, tower_budget=100)
    pace = build_scheduler(config, spec, paced=paced).image_scheduler.pace
    assert (pace is not None) == adapts
    assert pace is None or pace.tower_budget == 100
