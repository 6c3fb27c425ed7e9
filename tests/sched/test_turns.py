"""Turns between clients, and between the requests of a client: nobody waits for more than a turn
of each of the others.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from saccade.core.types import Request, SamplingParams
from saccade.sched.limits import SchedulerLimits
from saccade.sched.sequence import Run, Sequence
from saccade.sched.turns import TurnQueue, find_crowding, in_turn
from tests.sched.simulator import Simulation, picture
from tests.sched.test_scheduler import ENDLESS, image_request


def sequence(order: int, client: str = "", group: str = "", priority: int = 0) -> Sequence:
    told = (SamplingParams(), "", 0.0, client, group)
    return Sequence(Request(f"{order}", (1,), (), (), *told, priority=priority), order)


def fill(*who: tuple[str, str]) -> TurnQueue:
    queue = TurnQueue()
    for order, (client, group) in enumerate(who):
        queue.add(sequence(order, client, group))
    return queue


def orders(queue: TurnQueue) -> list[int]:
    return [each.order for each in queue]


def serve(queue: TurnQueue) -> int:
    first = next(iter(queue))
    queue.remove(first, served=True)
    return first.order


def test_requests_of_one_client_are_served_in_the_order_of_their_arrival() -> None:
    queue = fill(*[("", "")] * 5)
    assert orders(queue) == [0, 1, 2, 3, 4]
    assert [serve(queue) for _ in range(5)] == [0, 1, 2, 3, 4] and len(queue) == 0


def test_a_request_of_many_answers_has_one_turn_a_round() -> None:
    queue = fill(*[("", "many")] * 4, ("", "hi"), ("", "ho"))
    assert orders(queue) == [0, 4, 5, 1, 2, 3]
    assert [serve(queue) for _ in range(6)] == [0, 4, 5, 1, 2, 3]


def test_a_lesser_priority_is_served_first_within_its_client_and_no_sooner_beside_others() -> None:
    queue = TurnQueue()
    waits = [("a", "1", 0), ("a", "2", 5), ("b", "3", 0), ("a", "4", -1), ("a", "5", -1)]
    for order, (client, group, priority) in enumerate(waits):
        queue.add(sequence(order, client, group, priority))
    assert orders(queue) == [3, 2, 4, 0, 1]
    assert [serve(queue) for _ in range(5)] == [3, 2, 4, 0, 1]


def test_clients_take_turns_and_a_new_one_comes_last() -> None:
    queue = fill(*[("a", "")] * 3, ("b", ""), ("b", ""))
    assert orders(queue) == [0, 3, 1, 4, 2]
    assert serve(queue) == 0
    queue.add(sequence(9, "c"))
    assert orders(queue) == [3, 1, 9, 4, 2]


def test_who_lost_its_pages_comes_first_and_takes_no_turn() -> None:
    queue = fill(("a", ""), ("b", ""))
    queue.put_back(sequence(7, "b"))
    assert set(queue.clients) == {"a", "b"}
    assert [serve(queue) for _ in range(3)] == [7, 0, 1]


def test_who_leaves_changes_no_turn() -> None:
    queue = fill(("a", "x"), ("a", "y"), ("b", ""))
    queue.remove(next(iter(queue)), served=False)
    assert orders(queue) == [1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_between_two_turns_of_a_client_that_waits_each_other_has_one_at_most(seed: int) -> None:
    rng = random.Random(seed)
    queue, order = TurnQueue(), 0
    since: dict[str, Counter[str]] = {}  # by client that waits: turns of others since its own
    for _ in range(500):
        if rng.random() < 0.55 or not len(queue):
            client = rng.choice("aaaaabcdef")
            queue.add(sequence(order, client, rng.choice(["", "g"])))
            since.setdefault(client, Counter())
            order += 1
            continue
        first = next(iter(queue))
        queue.remove(first, served=True)
        since[first.client] = Counter()
        for client, turns in since.items():
            turns[first.client] += client != first.client
            assert max(turns.values()) <= 1, f"{client} was passed over twice"
        since = {client: turns for client, turns in since.items() if client in queue.clients}


def test_the_youngest_of_the_largest_share_makes_way() -> None:
    def crowds(newcomer: Sequence, running: list[Sequence], slots: int = 8) -> Sequence | None:
        queue = TurnQueue()
        queue.add(newcomer)
        return find_crowding(newcomer, queue, running, slots)

    many = [sequence(order, "a", "many") for order in range(6)]
    other = sequence(6, "a", "other")
    assert crowds(sequence(9, "a", "hi"), [*many, other]) is many[-1]
    assert crowds(sequence(9, "a", "hi"), [*many[:4], other]) is None, "half is its own"
    assert crowds(sequence(9, "a", "many"), [*many, other]) is None, "it has slots"
    singles = [sequence(order, "a") for order in range(8)]
    assert crowds(sequence(9, "b"), singles) is singles[-1]
    assert crowds(sequence(9, "a"), singles) is None
    assert crowds(sequence(9, "b"), singles[:1], 1) is None, "one each"


def test_who_holds_its_share_comes_after_the_others() -> None:
    queue = fill(("a", "many"), ("a", "hi"), ("b", ""))
    running = [sequence(order, "a", "many") for order in range(10, 14)]
    assert [each.order for each in in_turn(queue, running[:1], 8)] == [0, 2, 1]
    assert [each.order for each in in_turn(queue, running[:3], 6)] == [2, 0, 1]
    assert [each.order for each in in_turn(queue, [], 1)] == [0, 2, 1]


# ---- in the scheduler


LIMITS = SchedulerLimits(32, 2048, 4096, 16384)


@pytest.mark.first
@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_neighbour_is_admitted_within_a_few_steps_of_a_request_of_128_answers(
    in_flight: int, prefix: bool
) -> None:
    sim = Simulation(LIMITS, 1024, 16, prefix, in_flight=in_flight)
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60, "group": "many"}
    for _ in range(128):
        sim.add(sim.request([1, 2, 3, 4], **fields))
    advance(sim, 20)
    assert len(sim.scheduler.running) == 32
    hi = sim.add(sim.request([5, 6], max_tokens=2, ignore_eos=True))
    advance(sim, 3 + in_flight)
    assert sim.deltas[hi][-1].finish == "length"
    assert sim.scheduler.counts.preemptions == 1
    sim.run(100_000)
    sim.check_end()


def test_a_client_with_one_request_does_not_wait_for_those_of_a_client_with_many() -> None:
    sim = Simulation(LIMITS, 1024, 16)
    for first in range(100):
        sim.add(sim.request([1 + first % 30, 2], client="a", ignore_eos=True, max_tokens=60))
    advance(sim, 20)
    neighbours = [
        sim.add(sim.request([5, 6], client="b", ignore_eos=True, max_tokens=1)) for _ in range(3)
    ]
    advance(sim, 7)
    assert [sim.deltas[id][-1].finish for id in neighbours] == ["length"] * 3
    sim.run(100_000)


@pytest.mark.more
def test_text_takes_its_turn_while_images_wait_for_pixels_and_tower() -> None:
    """16 images come first; text is answered while none of them has been encoded."""
    limits = SchedulerLimits(8, 2048, 4096, 400, tower_budget=10, tower_blocks=2)
    sim = Simulation(limits, 1024, 16)
    shown = [sim.add(image_request(sim, picture(n, 100), before=300)) for n in range(16)]
    advance(sim, 5)
    texts = [sim.add(sim.request([3, n], **ENDLESS)) for n in range(4)]
    advance(sim, 15)
    assert [sim.deltas[id][-1].finish for id in texts] == ["length"] * 4
    assert not any(sim.deltas[id] for id in shown)
    sim.run(100_000)
    sim.check_end()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("prompts", "length"), [(1, 2000), (16, 60), (16, 2000)])
def test_a_short_prompt_waits_for_no_prompt_of_another_client(
    prompts: int, length: int, in_flight: int
) -> None:
    """It is answered by the first step that is planned after it came."""
    sim = Simulation(SchedulerLimits(32, 64, 4096, 16384), 4096, 16, in_flight=in_flight)
    for first in range(prompts):
        told = [1 + (7 * first + at) % 29 for at in range(length)]
        sim.add(sim.request(told, client="a", ignore_eos=True, max_tokens=2))
    advance(sim, 2)
    hi = sim.add(sim.request([5, 6], client="b", ignore_eos=True, max_tokens=1))
    advance(sim, in_flight)
    assert sim.deltas[hi][-1].finish == "length"
    sim.run(100_000)
    sim.check_end()


def test_clients_share_the_tokens_of_a_step() -> None:
    """A client with four prompts gets no more than one with one; alone again, each gets all."""
    sim = Simulation(SchedulerLimits(32, 64, 4096, 16384), 4096, 16, prefix=False, in_flight=1)
    spent = {client: [0] for client in "ab"}

    def step() -> None:
        advance(sim, 1)
        for client, counts in spent.items():
            counts.append(sum(run.computed for run in computing(sim, client)))

    for first in range(4):
        told = [1 + first] * 640
        sim.add(sim.request(told, client="a", ignore_eos=True, max_tokens=1))
    step()
    sim.add(sim.request([9] * 320, client="b", ignore_eos=True, max_tokens=1))
    for _ in range(9):
        step()
    assert spent == {"a": [0, 64, *range(96, 353, 32)], "b": [0, 0, *range(32, 289, 32)]}
    step()  # the last of b's
    step()
    assert spent["a"][-1] == spent["a"][-2] + 64
    sim.run(100_000)
    sim.check_end()


def computing(sim: Simulation, client: str) -> list[Run]:
    return [each.run for each in sim.scheduler.running if each.client == client and each.run]


def advance(sim: Simulation, steps: int) -> None:
    """So many steps; pixels come at once."""
    for _ in range(steps):
        while len(sim.flights) < sim.in_flight and not sim.plan().empty:
            pass
        if sim.flights:
            sim.finish(sim.flights[0][0])
        for key in list(sim.wanted):
            sim.send_pixels(key)
