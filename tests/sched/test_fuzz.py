"""Random traffic over random limits: every plan is checked by the simulated worker, every answer
against the reference.
"""

from __future__ import annotations

import random

import pytest

from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import Simulation, random_request


def simulation(rng: random.Random) -> tuple[Simulation, int]:
    page_size = rng.choice([1, 4, 16])
    longest = rng.choice([15, 40, 120])
    context = longest + rng.choice([1, 40, 90])
    tight = rng.random() < 0.6
    tokens = context if tight else 8 * context
    limits = SchedulerLimits(
        max_running=rng.choice([1, 3, 8]),
        chunk_tokens=rng.choice([1, 2, 7, 16, 64, 200]),
        context_length=context,
        encode_patches=rng.choice([1, 64, 1000]),
        look_ahead=rng.choice([0, 1, 4, 32]),
        worthwhile=rng.choice([1, 8, 32, 256]),
        arena_patches=rng.choice([1, 150, 10_000]),
    )
    pages = max(2, tokens // page_size + rng.choice([0, 1, 3]))
    budgets = {
        "embedding_tokens": rng.choice([1, 40, 90, 1000]),
        "host_tokens": rng.choice([0, 40, 90]),
        "disk_tokens": rng.choice([0, 60, 300]),
    }
    return Simulation(limits, pages, page_size, rng.random() < 0.7, **budgets), longest


class Chaos:
    """What can happen at any moment: requests come and go, pixels come in time, late, twice,
    unasked for, or not at all.
    """

    def __init__(self, rng: random.Random, requests: int) -> None:
        self.rng = rng
        self.left = requests
        self.simulation, self.longest = simulation(rng)
        self.names = rng.choice([0, 2, 6])
        self.patience = rng.choice([0.1, 0.5, 1.0])
        self.harm = rng.choice([0.0, 0.02, 0.1])
        self.simulation.worker.rng = rng
        self.simulation.worker.harm = self.harm
        self.arena = rng.choice([1, 2, 100])  # pictures

    def happen(self) -> None:
        rng, sim = self.rng, self.simulation
        while self.left and rng.random() < 0.4:
            self.left -= 1
            sim.add(
                random_request(sim, rng, self.longest + (rng.random() < 0.05) * 100, self.names)
            )
        for key in list(sim.wanted):
            if rng.random() < self.harm / 4:
                sim.fail_pixels(key)
            elif len(sim.worker.pixels) == self.arena:
                break
            elif rng.random() < self.patience:
                sim.send_pixels(key)
        if sim.alive and rng.random() < self.harm:
            sim.abort(rng.choice(sorted(sim.alive)))
        if sim.alive and rng.random() < 0.1:
            request = sim.alive[rng.choice(sorted(sim.alive))]
            for image in request.images[: self.arena - len(sim.worker.pixels)]:
                sim.send_pixels(image.key)
        sim.check()

    def run(self) -> None:
        sim = self.simulation
        silent = 0
        while self.left or sim.alive or not sim.scheduler.idle:
            self.happen()
            plan = sim.plan()
            if self.rng.random() < 0.3:
                self.happen()
            sim.finish(plan)
            decodes = not plan.encode and all(row.length == 1 for row in plan.rows)
            if decodes and sim.wanted and len(sim.worker.pixels) >= self.arena:
                sim.yield_pixels()
            silent = silent + 1 if plan.empty and not self.left else 0
            assert silent < 500, "deadlock: requests are alive, and no plan comes"
        assert not sim.plan().empty or sim.scheduler.idle
        sim.check_end()


@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 300))]
)
def test_random_traffic_keeps_every_invariant(seed: int) -> None:
    chaos = Chaos(random.Random(seed), requests=30)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30
