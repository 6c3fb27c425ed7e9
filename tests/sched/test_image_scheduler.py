"""Images from absent to shown: text goes on beside the tower, and slots are granted by need."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.core.plan import Plan
from saccade.sched.images.image_scheduler import TOWER_STEPS
from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import Simulation, picture
from tests.sched.test_scheduler import IMAGE, image_request, steps

BLOCKS = 24
BUDGET = 200


def simulation(in_flight: int = 1, **changes: Any) -> Simulation:
    fields: dict[str, Any] = {"tower_budget": BUDGET, "tower_blocks": BLOCKS} | changes
    limits = SchedulerLimits(8, 512, 1000, 10_000, **fields)
    return Simulation(limits, 256, 4, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_text_goes_on_between_the_begin_of_an_encoding_and_its_end(in_flight: int) -> None:
    sim = simulation(in_flight)
    sim.add(sim.request([1, 2, 3], ignore_eos=True, max_tokens=500))
    sim.finish(sim.plan())
    image = picture(1, 100)  # 400 patches
    shown = sim.add(image_request(sim, image))
    sim.send_pixels(image.key)
    plans: list[Plan] = []
    while not sim.deltas[shown]:
        while len(sim.flights) < in_flight:
            plans.append(sim.plan())
        sim.finish(sim.flights[0][0])
    began = next(i for i, plan in enumerate(plans) if plan.encode)
    shows = next(i for i, plan in enumerate(plans) if plan.splices)
    steps = -(-400 * BLOCKS // BUDGET)
    assert steps <= shows - began <= steps + in_flight
    assert all(plan.rows[0].length == 1 and plan.rows[0].sample for plan in plans), (
        "a token of text in every step"
    )
    assert {plan.tower for plan in plans[began:shows]} <= {0, BUDGET}


def test_a_small_image_takes_a_part_of_its_own_encoding_from_each_step() -> None:
    sim = simulation(tower_budget=1_000_000)
    sim.add(sim.request([1, 2, 3], ignore_eos=True, max_tokens=500))
    sim.finish(sim.plan())
    image = picture(1, 100)
    sim.add(image_request(sim, image))
    sim.send_pixels(image.key)
    assert sim.plan().tower == 400 * BLOCKS // TOWER_STEPS


def test_with_nothing_else_to_do_plans_go_on_with_the_tower_until_it_is_done() -> None:
    sim = simulation()
    image = picture(1, 100)
    sim.add(image_request(sim, image, max_tokens=1))
    assert sim.plan().empty
    sim.send_pixels(image.key)
    plans = []
    while not (plan := sim.plan()).empty:
        plans.append(plan)
        sim.finish(plan)
    alone = [plan for plan in plans if not (plan.rows or plan.encode or plan.close)]
    assert len(alone) == 400 * BLOCKS // BUDGET - 1 and all(plan.tower for plan in alone)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_tower_with_processors_of_its_own_comes_in_parts_only_beside_rows_that_decode(
    in_flight: int,
) -> None:
    """No step with such a row has more of the tower than the budget, two images or one; without
    one, nothing is held back.
    """
    sim = simulation(in_flight, tower_shares=False)
    text = sim.add(sim.request([1, 2, 3], ignore_eos=True, max_tokens=70))
    sim.finish(sim.plan())
    images = [picture(1, 100), picture(2, 30)]
    shown = [sim.add(image_request(sim, image, max_tokens=1)) for image in images]
    beside: list[int] = []
    for image in images:
        sim.send_pixels(image.key)
    while not all(sim.deltas[name] for name in shown):
        while len(sim.flights) < in_flight:
            beside.append(sim.plan().tower)
        sim.finish(sim.flights[0][0])
    assert text in sim.deltas and max(beside) <= BUDGET
    assert sum(beside) >= 520 * BLOCKS

    alone = simulation(tower_shares=False)
    image = picture(1, 100)
    alone.add(image_request(alone, image, max_tokens=1))
    alone.finish(alone.plan())
    alone.send_pixels(image.key)
    assert alone.plan().tower >= 400 * BLOCKS


def test_an_unbounded_tower_is_waited_for() -> None:
    sim = simulation(tower_budget=0)
    sim.worker.lag = 1.0
    image = picture(1, 100)
    sim.add(image_request(sim, image, max_tokens=1))
    sim.send_pixels(image.key)
    plans = []
    while not (plan := sim.plan()).empty:
        plans.append(plan)
        sim.finish(plan)
    assert [bool(plan.encode) for plan in plans[:2]] == [True, False]
    assert [plan.wait for plan in plans[:3]] == [False, True, False]
    assert {plan.tower for plan in plans} == {0}


def test_a_new_request_is_asked_for_at_once() -> None:
    sim = simulation()
    image = picture(1, 20)
    sim.scheduler.add_request(image_request(sim, image))
    ((key, slot),) = sim.scheduler.take_notices().want
    assert key == image.key and slot.nbytes == IMAGE


def test_an_image_that_nobody_needs_is_called_off_and_may_be_wanted_again() -> None:
    sim = simulation()
    image = picture(1, 20)
    sim.abort(sim.add(image_request(sim, image)))
    assert sim.unwanted == {image.key}
    again = sim.add(image_request(sim, image, max_tokens=1))
    assert sim.asked == {image.key: 1}, "its slot is still being written"
    sim.fail_pixels(image.key)
    sim.run()
    assert sim.deltas[again][-1].finish == "length" and sim.asked == {image.key: 2}


def test_a_piece_of_the_arena_too_small_for_what_is_needed_first_is_joined_with_others() -> None:
    """The arena is in use by small images of later requests, which cannot be encoded: the device
    holds no more. The large one comes first and gets their room.
    """
    limits = SchedulerLimits(1, 512, 1000, 10_000, arena_bytes=4 * IMAGE)
    sim = Simulation(limits, 256, 4, prefix=False, embedding_tokens=20)
    first = sim.add(image_request(sim, picture(1, 20), picture(2, 80), max_tokens=1))
    small = [sim.add(image_request(sim, picture(10 + n, 20), max_tokens=1)) for n in range(4)]
    sim.run()
    assert [sim.deltas[id][-1].finish for id in (first, *small)] == ["length"] * 5
    assert 6 <= sim.worker.encoded.total() <= 7, "one was encoded too early at most"
    sim.check_end()


def test_what_the_disk_has_no_room_for_keeps_none_on_the_device() -> None:
    limits = SchedulerLimits(1, 8, 200, 10_000, early_tokens=8)
    sim = Simulation(limits, 64, 4, embedding_tokens=40, disk_tokens=10)
    first, later = picture(1, 20), picture(2, 30)
    for request in (image_request(sim, first, before=8), image_request(sim, later)):
        sim.add(request)
    sim.send_pixels(later.key)
    sim.finish(sim.plan())  # `later` is encoded ahead, as the other's image is not there yet
    assert sim.worker.encoded == {later.key: 1}
    sim.send_pixels(first.key)
    plan = sim.plan()
    assert [encode.key for encode in plan.encode] == [first.key] and not plan.save
    assert [move.key for move in plan.moves] == [later.key]
    assert sim.embeddings.device.used_bytes <= sim.embeddings.device.budget_bytes
    sim.finish(plan)
    sim.run()
    sim.check_end()


@pytest.mark.parametrize(("chunk_aware", "encoded"), [(True, 2), (False, 3)])
def test_only_images_in_chunks_to_compute_are_encoded(chunk_aware: bool, encoded: int) -> None:
    """The second request has the first one's KV. Without room for embeddings, its image is encoded
    again only if all images of a prompt are.
    """
    sim = Simulation(
        SchedulerLimits(8, 512, 1000, 10_000, chunk_aware=chunk_aware), 256, 4, embedding_tokens=0
    )
    first, second = picture(1, 16), picture(2, 16)
    for images in ((first,), (first, second)):
        sim.add(image_request(sim, *images, before=4, max_tokens=1))
        sim.run()
    assert sim.scheduler.counts.images_encoded == encoded


@pytest.mark.parametrize("chunk_aware", [True, False])
def test_a_chunk_waits_for_later_images_only_if_all_are_encoded_first(chunk_aware: bool) -> None:
    sim = Simulation(SchedulerLimits(8, 16, 1000, 10_000, chunk_aware=chunk_aware), 256, 4)
    first, second = picture(1, 16), picture(2, 16)
    answer = sim.add(image_request(sim, first, second, max_tokens=1))
    sim.plan()
    sim.send_pixels(first.key)
    rows = [plan.rows for plan in steps(sim) if plan.rows]
    assert bool(rows) is chunk_aware
    sim.send_pixels(second.key)
    sim.run()
    assert sim.deltas[answer][-1].finish
