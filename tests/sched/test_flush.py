"""Caches that are flushed: what is not in use is computed again, and what runs goes on unharmed."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import Simulation, picture
from tests.sched.test_scheduler import image_request

LIMITS = SchedulerLimits(8, 512, 1000, 10_000)


def simulation(in_flight: int = 1, **more: Any) -> Simulation:
    return Simulation(LIMITS, 256, 4, in_flight=in_flight, **more)


def cached(sim: Simulation, id: str) -> int:
    return sim.deltas[id][0].cached_tokens


def levels(sim: Simulation, id: str) -> list[str]:
    return [outcome.level for outcome in sim.deltas[id][0].images]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("embeddings", "encodings", "level"), [(False, 1, "embedding"), (True, 2, "none")]
)
def test_a_flush_is_a_cold_start_for_what_comes_later(
    in_flight: int, embeddings: bool, encodings: int, level: str
) -> None:
    sim, image = simulation(in_flight), picture(1, 20)
    first = sim.add(image_request(sim, image))
    sim.run()
    again = sim.add(image_request(sim, image))
    sim.run()
    assert cached(sim, again) > 0 and levels(sim, again) == ["kv"]
    sim.flush(embeddings)
    assert sim.pool.free == sim.pool.capacity, "no page is the cache's"
    late = sim.add(image_request(sim, image))
    sim.run()
    assert (cached(sim, late), levels(sim, late)) == (0, [level])
    assert sim.worker.encoded[image.key] == encodings
    assert sim.asked[image.key] == encodings, "kept pixels are flushed with the embeddings"
    assert sim.output(first)[:5] == sim.output(late)[:5]
    sim.check_end()


def test_embeddings_leave_every_tier_with_the_next_plan() -> None:
    """20 tokens on the device, 20 on the host, all four images on disk."""
    sim = simulation(embedding_tokens=20, host_tokens=20, disk_tokens=1000)
    images = [picture(n, 20) for n in range(1, 5)]
    for image in images:
        sim.add(image_request(sim, image, max_tokens=1))
        sim.run()
    tiers = sim.worker.tiers
    assert [len(tiers[place]) for place in ("device", "host", "disk")] == [1, 1, 4]
    evictions = [shelf.evictions for shelf in sim.embeddings.tiers.values()]
    sim.flush(embeddings=True)
    assert not sim.scheduler.idle, "the workers have yet to let go"
    plan = sim.plan()
    assert len(plan.moves) == 6 and {move.target for move in plan.moves} == {None}
    sim.finish(plan)
    assert not any(tiers.values())
    assert (len(sim.flights), sim.scheduler.idle) == (0, True)
    assert [shelf.used_bytes for shelf in sim.embeddings.tiers.values()] == [0, 0, 0]
    assert [shelf.evictions for shelf in sim.embeddings.tiers.values()] == evictions
    sim.check_end()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_at_whatever_step_a_flush_comes_requests_go_on(in_flight: int) -> None:
    """The simulated worker checks each step, and each answer is the reference's: of one request
    that runs, one that waits with what it had found, and one whose image is being encoded.
    """
    seen, fresh = picture(1, 20), picture(2, 20)
    for step in range(12):
        limits = SchedulerLimits(2, 16, 1000, 10_000, tower_budget=100, tower_blocks=2)
        sim = Simulation(
            limits, 256, 4, embedding_tokens=40, host_tokens=40, disk_tokens=80, in_flight=in_flight
        )
        sim.add(image_request(sim, seen, max_tokens=1))
        sim.run()
        ids = [sim.add(image_request(sim, *images)) for images in ((seen,), (fresh, seen), (seen,))]
        for at in range(step):
            for key in list(sim.wanted):
                sim.send_pixels(key)
            while len(sim.flights) < in_flight and not sim.plan().empty:
                pass
            if at and sim.flights:
                sim.finish(sim.flights[0][0])
        sim.flush(embeddings=True)
        sim.check()
        sim.run()
        assert [sim.deltas[id][-1].finish for id in ids] == ["length"] * 3
        sim.check_end()


def test_a_running_request_keeps_its_pages_and_its_image() -> None:
    sim, image = simulation(), picture(1, 20)
    running = sim.add(image_request(sim, image, max_tokens=100))
    sim.plan()
    sim.send_pixels(image.key)
    while len(sim.output(running)) < 3:
        while len(sim.flights) < sim.in_flight and not sim.plan().empty:
            pass
        sim.finish(sim.flights[0][0])
    sim.flush(embeddings=True)
    sim.run()
    assert len(sim.output(running)) == 100 and sim.scheduler.counts.preemptions == 0
    assert sim.worker.encoded[image.key] == 1


def test_an_image_that_a_waiting_request_had_found_is_asked_for_ahead_of_its_turn() -> None:
    sim = Simulation(SchedulerLimits(1, 512, 1000, 10_000), 256, 4)
    image = picture(1, 20)
    sim.add(image_request(sim, image, max_tokens=1))
    sim.run()
    sim.add(sim.request([7, 8, 9], ignore_eos=True, max_tokens=20))
    sim.finish(sim.plan())
    waits = sim.add(image_request(sim, image))
    sim.finish(sim.plan())
    assert not sim.wanted, "its tokens are in the prefix cache"
    sim.flush(embeddings=True)
    sim.finish(sim.plan())
    assert not sim.deltas[waits] and set(sim.wanted) == {image.key}
    sim.run()
    assert (cached(sim, waits), levels(sim, waits)) == (0, ["none"])
