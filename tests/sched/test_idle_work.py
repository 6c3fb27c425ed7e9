"""Work that nobody waits for: it takes idle steps alone."""

from __future__ import annotations

from dataclasses import replace

from saccade.core.plan import TOWER_RESTS
from saccade.core.types import Image, Request, Span
from saccade.sched.parts.idle_work import IDLE_TOKENS
from tests.sched.simulator import Simulation, picture
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
