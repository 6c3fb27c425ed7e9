"""What a step does of images and prompts follows the pauses that decoding rows have beside it."""

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
from saccade.engine.schedulers import build_scheduler
from saccade.engine.sizing import prompt_sizes
from saccade.families.registry import load_spec
from saccade.sched.limits import SchedulerLimits
from saccade.sched.step_pace import MAX_PAUSE, MIN_PART, PromptPace, StepPace
from tests.fixtures.harness import CONFIG
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
    pace: StepPace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = StepPace(BEGUN, MOST, clock=lambda: self.time)
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
    assert np.mean(np.array(pauses) > MAX_PAUSE) < 0.02
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
    assert device.pace.tower_budget == BEGUN // MIN_PART


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
    pace = StepPace(400, 10_000, clock=lambda: time.monotonic() + passed)
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
    assert min(taken) == 400 // MIN_PART


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
    assert pace is None or pace.prompts is None, "without a limit"


def test_prompts_begin_with_few_tokens_of_the_sizes_that_graphs_have(
    checkpoint: Callable[..., Path],
) -> None:
    spec = load_spec(checkpoint("qwen3_vl"))
    config = replace(CONFIG, device="cuda", prompt_pause=0.025, chunk_tokens=1000)
    pace = build_scheduler(config, spec).image_scheduler.pace
    assert pace is not None and pace.prompts is not None and pace.prompts.tokens == 256
    assert prompt_sizes(1000) == (256, 384, 512, 768, 1000)
    assert prompt_sizes(200) == (200,)


# ---- prompts

SIZES = prompt_sizes(8192)
PAUSE = 0.025


class Prompts:
    """Steps of 8 decoding rows, each token of a prompt beside them `each` seconds."""

    def __init__(self, each: float, alone: float = STEP) -> None:
        self.each, self.alone, self.time = each, alone, 100.0
        self.prompts = PromptPace(SIZES, PAUSE)
        self.pace = StepPace(BEGUN, MOST, self.prompts, lambda: self.time)
        self._noise = np.random.default_rng(1)
        for _ in range(50):
            self.step(0)

    def step(self, tokens: int) -> float:
        """Return its seconds."""
        begun = self.time
        took = (self.alone + tokens * self.each) * self._noise.lognormal(0, 0.02)
        self.time += took
        rows = [Row(slot, 5, 1, (), sample=True) for slot in range(8)]
        rows += [Row(8, 0, tokens, (), sample=False)] if tokens else []
        self.pace.ended(plan(tuple(rows), 0), begun, encoding=False)
        return took

    def prompt(self, tokens: int) -> tuple[list[int], list[float]]:
        """Compute a prompt. Returns each step's tokens and seconds."""
        chunks, seconds = [], []
        while tokens:
            chunks.append(min(tokens, self.prompts.tokens))
            seconds.append(self.step(chunks[-1]))
            tokens -= chunks[-1]
        return chunks, seconds


@pytest.mark.parametrize("each", [2e-4, 6.5e-5, 2.9e-5, 5e-6, 1e-7])
def test_a_step_has_as_many_tokens_of_prompts_as_its_time_allows(each: float) -> None:
    device = Prompts(each)
    device.prompt(60_000)
    chunks, seconds = device.prompt(20 * 3700)
    allowed = (PAUSE - STEP) / each
    fits = [size for size in SIZES if size * 1.1 <= allowed] or [SIZES[0]]
    assert fits[-1] <= np.median(chunks) <= max(allowed, SIZES[0])
    slow = PAUSE if allowed > SIZES[0] else STEP + SIZES[0] * each
    assert np.mean(np.array(seconds) > 1.1 * slow) < 0.01


def test_a_token_that_takes_longer_shrinks_the_chunk_at_once() -> None:
    device = Prompts(5e-6)
    device.prompt(60_000)
    assert device.prompts.tokens == 3072
    device.each = 6.5e-5  # behind a long prefix
    device.step(3072)
    assert device.prompts.tokens == 256


def test_rows_that_alone_take_longer_leave_prompts_as_much_again() -> None:
    device = Prompts(2.9e-5, alone=0.04)
    device.prompt(60_000)
    assert device.prompts.tokens == 1024, "40 ms, twice the step, and no less for the limit"


def test_a_short_rest_of_a_prompt_is_no_measure() -> None:
    device = Prompts(5e-6)
    device.prompt(60_000)
    assert device.prompts.tokens == 3072
    device.each = 1e-4
    for _ in range(100):
        device.step(20)
    assert device.prompts.tokens == 3072


@pytest.mark.parametrize(("streamed", "most"), [(True, 16), (False, 64 - 1)])
def test_prompts_are_paced_while_somebody_reads_an_answer(streamed: bool, most: int) -> None:
    """Answers are those of whole chunks: the simulation compares each."""
    passed = 0.0
    prompt_pace = PromptPace((16, 64), 1e-9)  # any prompt is too long
    pace = StepPace(400, 10_000, prompt_pace, clock=lambda: time.monotonic() + passed)
    limits = SchedulerLimits(8, 64, 1000, 10_000, tower_shares=False)
    sim = Simulation(limits, 256, 4, pace=pace)
    first = sim.request([1, 2, 3], ignore_eos=True, max_tokens=40)
    sim.add(replace(first, streamed=streamed))
    while sim.scheduler.counts.steps < 5:
        made = sim.plan()
        passed += 1000
        sim.finish(made)
    sim.add(sim.request([2] * 200, ignore_eos=True, max_tokens=3))
    prompts = []
    while sim.alive:
        made = sim.plan()
        chunks = [row.length for row in made.rows if row.length > 1]
        prompts.extend([sum(chunks)] if chunks else [])
        passed += 3000 if chunks else 1000  # beside which the test's own time is nothing
        sim.finish(made)
    assert sum(prompts) == 200 and max(prompts) == most
    assert len(prompts) == -(-200 // most)


def test_prompts_have_whole_steps_where_nothing_decodes() -> None:
    pace = StepPace(400, 10_000, PromptPace((16, 64), 1e-9))
    sim = Simulation(SchedulerLimits(8, 64, 1000, 10_000, tower_shares=False), 256, 4, pace=pace)
    sim.add(sim.request([2] * 192, ignore_eos=True, max_tokens=3))
    assert [sim_step(sim) for _ in range(3)] == [64, 64, 64]


def sim_step(sim: Simulation) -> int:
    """Run a step. Returns its tokens."""
    made = sim.plan()
    sim.finish(made)
    return sum(row.length for row in made.rows)


def test_rows_that_never_decode_alone_are_measured_by_fewer_rows() -> None:
    """Otherwise their own time would count as the prompt's, and its chunks stay small."""
    now, alone, each = 100.0, 20e-3, 20e-6
    prompts = PromptPace((256, 512, 1024), pause=25e-3)
    pace = StepPace(BEGUN, MOST, prompts, clock=lambda: now)

    def step(rows: int, tokens: int) -> None:
        nonlocal now
        begun, now = now, now + alone + tokens * each
        decoding = tuple(Row(slot, 5, 1, (), sample=True) for slot in range(rows))
        chunk = (Row(rows, 0, tokens, (), sample=False),) * bool(tokens)
        pace.ended(Plan(0, rows=decoding + chunk), begun, encoding=False)

    for _ in range(4):
        step(20, 0)
    for _ in range(20):
        step(40, prompts.tokens)
    assert prompts.tokens == 512  # 10 ms beside rows that take 20
