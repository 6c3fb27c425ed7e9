"""Work that nobody waits for: it takes idle steps alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from saccade.cache.snapshots import Snapshots
from saccade.core.plan import TOWER_RESTS
from saccade.core.types import Image, Request, Span
from saccade.sched.turns import IDLE_TOKENS
from tests.sched.simulator import Simulation, picture, random_request
from tests.sched.test_scheduler import limits


def test_a_request_waits_for_one_small_step_of_work_that_nobody_waits_for() -> None:
    """Idle work has one small step in flight, steps aside at once, and goes on afterwards with what
    it has computed.
    """
    sim = Simulation(limits(chunk_tokens=400, context_length=700), 100, 16, in_flight=2)
    idle = sim.request([1] * 600, max_tokens=1)
    sim.add(replace(idle, caching=replace(idle.caching, idle=True)))
    plan = sim.plan()
    assert plan.num_tokens == IDLE_TOKENS and sim.plan().empty
    sim.finish(plan)
    plan = sim.plan()
    mine = sim.add(sim.request([2] * 300, max_tokens=1))
    beside = sim.plan()
    assert [row.length for row in beside.rows] == [300], "nothing of the idle work"
    sim.finish(plan)
    sim.finish(beside)
    assert sim.output(mine) and not sim.output(idle.id)
    sim.run()
    assert sim.output(idle.id)
    cached = sim.scheduler.prefix
    assert cached is not None and cached.pages == 600 // 16 + 300 // 16
    sim.check_end()


def test_an_image_that_nobody_waits_for_rests_while_somebody_decodes() -> None:
    """Its encoding goes on in parts of idle steps; one that somebody waits for passes it."""
    settings = replace(limits(chunk_tokens=64), tower_budget=100, tower_blocks=4)
    sim = Simulation(settings, 100, 16, in_flight=1)
    slow, quick = picture(1, 30), picture(2, 30)

    def about(image: Image) -> Request:
        length = image.num_tokens
        return sim.request([3] + [39] * length + [4], (Span(1, length, 0),), (image,), max_tokens=9)

    idle = about(slow)
    sim.add(replace(idle, caching=replace(idle.caching, idle=True)))
    while not sim.worker.encoding:
        for key in list(sim.wanted):
            sim.send_pixels(key)
        sim.finish(sim.plan())
    left = sim.worker.encoding[slow.key]
    assert left > 0, "in parts"
    sim.add(sim.request([5] * 20, max_tokens=9))
    sim.finish(sim.plan())
    assert sim.plan().tower == TOWER_RESTS
    sim.finish(sim.flights[0][0])
    assert sim.worker.encoding == {slow.key: left}
    sim.add(about(quick))
    while sim.worker.encoded[quick.key] == 0 or quick.key in sim.worker.encoding:
        for key in list(sim.wanted):
            sim.send_pixels(key)
        sim.finish(sim.plan())
    assert sim.worker.encoding[slow.key] > left - 100, "it gets what the last step had left over"
    sim.run()
    assert sim.worker.encoded[slow.key] == 1
    sim.check_end()


def test_idle_work_shows_an_image_whole_that_is_larger_than_its_steps() -> None:
    length = 2 * IDLE_TOKENS
    settings = replace(limits(chunk_tokens=400, context_length=700), whole_image_tokens=length)
    sim = Simulation(settings, 100, 16, in_flight=2)
    image = picture(1, length)
    prompt = [3] * 10 + [39] * length + [4] * 10
    idle = sim.request(prompt, (Span(10, length, 0),), (image,), max_tokens=1)
    sim.add(replace(idle, caching=replace(idle.caching, idle=True)))
    sim.run()
    assert sim.output(idle.id)


@pytest.mark.parametrize("states", [False, True], ids=["pages", "states"])
def test_no_idle_work_is_planned_while_somebody_waits(states: bool) -> None:
    """Random traffic, awaited and not: no step mixes them, no idle step is planned while an awaited
    request runs or waits, and at most one idle step is in flight.
    """
    for seed in range(4):
        rng = random.Random(seed)
        settings = limits(chunk_tokens=rng.choice([16, 200]), context_length=400)
        settings = replace(settings, snapshot_tokens=20 if states else 0)
        pages, lines = rng.choice([30, 200]), rng.choice([2, 20]) if states else None
        sim = Simulation(settings, pages, 16, in_flight=2, snapshots=lines)
        idle: set[str] = set()
        for _ in range(120):
            if rng.random() < 0.2:
                request = random_request(sim, rng, 120, 5)
                if rng.random() < 0.5:
                    caching = replace(request.caching, idle=True, branch=rng.randrange(120))
                    request = sim.requests[len(sim.requests) - 1] = replace(
                        request, caching=caching
                    )
                    idle.add(request.id)
                sim.add(request)
            awaited = sim.alive.keys() - idle
            if len(sim.flights) < 2:
                plan = sim.plan()
                asked = {plan_owner(sim, row.slot) for row in plan.rows}
                assert not (asked & idle and awaited), "idle work while somebody waits"
                assert not (asked & idle and len(sim.flights) > 1), "one step is begun at most"
            if sim.flights and rng.random() < 0.7:
                sim.finish(sim.flights[0][0])
            for key in [key for key in sim.wanted if rng.random() < 0.5]:
                if key in sim.unwanted:
                    sim.fail_pixels(key)
                else:
                    sim.send_pixels(key)
        sim.run()
        sim.check_end()


@pytest.mark.parametrize("states", [False, True], ids=["pages", "states"])
def test_eight_streams_meet_one_begun_step_of_idle_work_and_no_more(states: bool) -> None:
    """Eight agents' next prompts wait while eight others stream, who come one after another."""
    settings = replace(limits(chunk_tokens=400, context_length=700), snapshot_tokens=50)
    sim = Simulation(settings, 600, 16, in_flight=2, snapshots=40 if states else None)
    for number in range(8):
        idle = sim.request([number + 1] * 300, max_tokens=1)
        sim.add(replace(idle, caching=replace(idle.caching, idle=True, branch=100)))
    ahead = {*sim.alive}
    begun = sim.plan()
    assert 0 < begun.num_tokens <= IDLE_TOKENS, "one small step, while nobody waits"
    streams = [sim.request([20 + number] * 40, max_tokens=12) for number in range(8)]
    steps = 0
    while streams or sim.alive.keys() - ahead:
        if streams:
            sim.add(streams.pop())
        plan = sim.plan()
        assert plan.rows and not {plan_owner(sim, row.slot) for row in plan.rows} & ahead
        if not steps:
            sim.finish(begun)
        sim.finish(plan)
        steps += 1
    assert steps <= 8 + 12, "none was lost to idle work"
    assert not any(sim.output(each) for each in ahead)
    sim.run()
    assert all(sim.output(each) for each in ahead)
    sim.check_end()


def plan_owner(sim: Simulation, slot: int) -> str:
    """Return whose rows a slot has."""
    running = sim.scheduler.running
    return next(each.request.id for each in running if each.run and each.run.slot == slot)


def test_a_snapshot_that_nobody_waited_for_goes_first_until_it_is_used() -> None:
    snapshots: Snapshots[str] = Snapshots(0, 2)
    for holder in ("ours", "ahead"):
        line, _ = snapshots.allocate_slot(lambda _: True)
        assert line is not None
        snapshots.attach(holder, line, idle=holder == "ahead")
    line, loser = snapshots.allocate_slot(lambda _: True)
    assert line is not None and loser == "ahead"
    snapshots.attach("ahead", line, idle=True)
    snapshots.touch("ahead")
    assert snapshots.allocate_slot(lambda _: True)[1] == "ours"


def test_a_state_is_saved_where_the_next_prompt_will_branch() -> None:
    settings = replace(limits(chunk_tokens=400, context_length=700), snapshot_tokens=1000)
    sim = Simulation(settings, 100, 16, in_flight=1, snapshots=8)
    ahead = sim.request([1] * 300, max_tokens=1)
    sim.add(replace(ahead, caching=replace(ahead.caching, idle=True, branch=170)))
    sim.run()
    other = sim.add(sim.request([1] * 170 + [2] * 50, max_tokens=1))
    sim.run()
    assert sim.deltas[other][0].cached_tokens == 160, "the last page before the branch"
