"""Random traffic over random limits: every plan is checked by the simulated worker, every answer
against the reference.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from zlib import crc32

import pytest

from saccade.core.plan import PageTier
from saccade.plugins.tiers.page_arrivals import NONE, Bytes, ReadRates
from saccade.sched.limits import DraftLimits, SchedulerLimits
from tests.helpers.breadth import broad
from tests.helpers.page_tiers import arrivals_of
from tests.sched.simulator import Oracle, Simulation, guess_with, random_request

MAX_TOKENS = 30
CALM = 0.05
"""Requests come so seldom that some have all slots and pages that they want."""
LARGEST = MAX_TOKENS * 4 * 16 * 16 * 3
"""Bytes of the largest image's pixels."""


def simulation(
    rng: random.Random,
    in_flight: int,
    states: bool,
    kept: bool,
    guesses: bool,
    whole: bool,
    plan_steps: int,
    chunk_aware: bool,
) -> tuple[Simulation, int]:
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
        early_tokens=rng.choice([1, 8, 32, 256]),
        arena_bytes=LARGEST * rng.choice([1, 2, 100]),
        chunk_aware=chunk_aware,
        tower_budget=rng.choice([0, 1, 50, 300]),
        tower_blocks=3,
        snapshot_tokens=rng.choice([1, 20, 64]) if states else 0,
        drafts=DraftLimits(6 * guesses, head=guesses and rng.random() < 0.5),
        whole_image_tokens=MAX_TOKENS * whole,
        plan_steps=plan_steps,
    )
    pages = max(2, tokens // page_size + rng.choice([0, 1, 3]))
    embedding_tokens = rng.choice([1, 40, 90, 1000])
    host_tokens, disk_tokens = rng.choice([0, 40, 90]), rng.choice([0, 60, 300])
    prefix = kept or rng.random() < 0.7
    snapshots = rng.choice([1, 2, 5, 40]) if states else None
    if snapshots and guesses:
        first = limits.max_running + snapshots
        between = range(first, first + rng.choice([1, 4, 12]))
        limits = replace(limits, drafts=replace(limits.drafts, states=between))
    made = Simulation(
        limits,
        pages,
        page_size,
        prefix,
        embedding_tokens=embedding_tokens,
        host_tokens=host_tokens,
        disk_tokens=disk_tokens,
        in_flight=in_flight,
        snapshots=snapshots,
        kept_pages=rng.choice([0, 2, 10, 1000]) if kept else 0,
        host_pages=rng.choice([0, 1, 8, 30]) if kept else 0,
    )
    return made, longest


class Chaos:
    """What can happen at any moment: requests come and go, pixels come in time, late, or not at
    all, caches are flushed, memory is short.
    """

    def __init__(
        self,
        rng: random.Random,
        requests: int,
        in_flight: int,
        *,
        states: bool = False,
        kept: bool = False,
        guesses: bool = False,
        idle: bool = False,
        whole: bool = False,
        short: bool = False,
        plan_steps: int = 1,
        chunk_aware: bool = True,
        rush: float = 0.4,
    ) -> None:
        """rush: how likely one more request comes at a moment."""
        self.rng = rng
        self.rush = rush
        self.short = short
        self.idle = idle
        self.left = requests
        which = states, kept, guesses, whole, plan_steps, chunk_aware
        self.simulation, self.longest = simulation(rng, in_flight, *which)
        self.oracle: Oracle | None = None
        if guesses:
            self.oracle = Oracle(self.simulation, rng, rng.choice([0.0, 0.5, 0.9, 1.0]))
            guess_with(self.simulation.scheduler, self.oracle)
        self.names = rng.choice([0, 2, 6])
        self.patience = rng.choice([0.1, 0.5, 1.0])
        self.harm = rng.choice([0.0, 0.02, 0.1])
        self.simulation.worker.rng = rng
        self.simulation.worker.harm = self.harm
        self.simulation.worker.lag = rng.choice([0.0, 0.5, 0.9])
        if self.simulation.scheduler.loads:
            arrivals_of(self.simulation.scheduler).rates = Whims(self)

    def happen(self) -> None:
        rng, sim = self.rng, self.simulation
        while self.left and rng.random() < self.rush:
            self.left -= 1
            longest = self.longest + (rng.random() < 0.05) * 100
            request = random_request(sim, rng, longest, self.names)
            if self.idle and rng.random() < 0.5:
                request = replace(request, caching=replace(request.caching, idle=True))
            sim.add(request)
        for key in list(sim.wanted):
            if rng.random() < (0.5 if key in sim.unwanted else self.harm / 4):
                sim.fail_pixels(key)
            elif rng.random() < self.patience:
                sim.send_pixels(key)
        if sim.alive and rng.random() < self.harm:
            sim.abort(rng.choice(sorted(sim.alive)))
        if rng.random() < self.harm:
            sim.flush(embeddings=rng.random() < 0.7)
        if self.short and rng.random() < 0.2:
            sim.release_memory(rng.choice([1, 500, 1 << 30]), rng.choice([1, 3, 1000]))
        sim.check()

    def run(self) -> None:
        sim = self.simulation
        silent = 0
        while self.left or sim.alive or not sim.scheduler.idle or sim.wanted:
            self.happen()
            while len(sim.flights) < sim.in_flight and not sim.plan().empty:
                if self.rng.random() < 0.3:
                    self.happen()
            silent = 0 if self.left or sim.flights else silent + 1
            assert silent < 500, "deadlock: requests are alive, and no plan comes"
            if sim.flights:
                sim.finish(sim.flights[0][0])
        assert sim.plan().empty
        sim.check_end()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(8)))
def test_random_traffic_keeps_every_invariant(seed: int, in_flight: int) -> None:
    chaos = Chaos(random.Random(seed), 30, in_flight)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.first
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("seed", broad(range(300), keep=(*range(6), 8, 45, 54, 55)))
def test_no_chunk_ends_within_an_image_that_sees_itself(seed: int, kept: bool) -> None:
    """The same with images that are computed whole or not at all, in steps of any size, wherever
    pages end.
    """
    chaos = Chaos(random.Random(seed), 30, 2, kept=kept, whole=True, idle=bool(seed % 2))
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(6)))
def test_images_encoded_before_any_chunk_leave_every_answer_alone(seed: int, kept: bool) -> None:
    """The same with all images of a prompt at once, in caches of any size."""
    chaos = Chaos(random.Random(seed), 30, 2, kept=kept, idle=bool(seed % 2), chunk_aware=False)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.first
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(4)))
def test_states_of_sequences_are_their_own(seed: int, in_flight: int) -> None:
    """The same with a model that keeps a state per sequence, and few snapshots of them."""
    chaos = Chaos(random.Random(seed), 30, in_flight, states=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(8)))
def test_pages_that_come_back_from_disk_are_those_that_left(
    seed: int, in_flight: int, states: bool
) -> None:
    """The same with pages on disk, of which some are damaged, some come late, and some are not
    worth reading.
    """
    chaos = Chaos(random.Random(seed), 30, in_flight, states=states, kept=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.first
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("seed", broad(range(300), keep=(*range(4), 167, 171, 272)))
def test_work_that_nobody_waits_for_steps_aside_at_any_moment(
    seed: int, kept: bool, states: bool
) -> None:
    """The same where half of the requests are idle work: they end all the same, with the answers
    that they have alone, and none is computed beside a request of somebody who waits.
    """
    chaos = Chaos(random.Random(seed), 30, 2, states=states, kept=kept, idle=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.first
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=(*range(8), 47, 259)))
def test_guesses_right_and_wrong_leave_every_answer_alone(
    seed: int, in_flight: int, kept: bool
) -> None:
    chaos = Chaos(random.Random(seed), 30, in_flight, kept=kept, guesses=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.first
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(4)))
def test_states_are_those_after_the_last_right_guess(seed: int, in_flight: int, kept: bool) -> None:
    """The same with a model that keeps a state per sequence, and few lines for those between."""
    chaos = Chaos(random.Random(seed), 30, in_flight, states=True, kept=kept, guesses=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.parametrize("states, guesses", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(4)))
def test_several_steps_in_a_plan_end_at_any_moment(
    seed: int, in_flight: int, kept: bool, states: bool, guesses: bool
) -> None:
    """The same with plans of several steps, which a halt may reach at any step, or too late."""
    rng = random.Random(seed)
    steps, idle = rng.choice([2, 3, 8]), rng.random() < 0.3
    more = {"kept": kept, "states": states, "guesses": guesses}
    chaos = Chaos(rng, 30, in_flight, plan_steps=steps, idle=idle, rush=CALM, **more)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30


@pytest.mark.more
def test_the_traffic_above_does_halt_several_steps() -> None:
    """Else it would show nothing."""
    halts, skipped = 0, 0
    for seed in range(12):
        chaos = Chaos(random.Random(seed), 30, 2, plan_steps=8, rush=CALM)
        chaos.run()
        halts += chaos.simulation.halts
        skipped += chaos.simulation.skipped
    assert halts > 10 and skipped > 20


@pytest.mark.slow
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_the_traffic_above_does_guess(states: bool) -> None:
    """Else it would show nothing. Right guesses save steps, wrong ones cost none."""
    guessed, right, saved = 0, 0, 0
    for seed in range(12):
        chaos = Chaos(random.Random(seed), 30, 2, states=states, guesses=True)
        chaos.run()
        assert chaos.oracle is not None
        guessed += chaos.oracle.proposed.total()
        right += chaos.oracle.accepted.total()
        saved += chaos.simulation.worker.saved_between
    assert 100 < right < guessed and (saved > 20) == states


class Whims(ReadRates):
    """Whether reading pays is chance, but the same until something has happened."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chance = chaos.rng.choice([0, 1, 20])
        self._counts = chaos.simulation.scheduler.counts

    def pays(self, tokens: int, nbytes: Bytes, measured: Mapping[PageTier, float] = NONE) -> bool:
        del measured
        given = sorted(nbytes.items())
        return crc32(repr((self._counts.steps, tokens, given)).encode()) % 100 >= self._chance


@pytest.mark.more
def test_the_traffic_above_does_restore_pages() -> None:
    """Else it would show nothing."""
    restored: Counter[str] = Counter()
    for seed in range(12):
        chaos = Chaos(random.Random(seed), 30, 1, kept=True)
        chaos.run()
        shelves = chaos.simulation.worker.kept
        restored.update({place: shelf.restored for place, shelf in shelves.items()})
    assert min(restored["host"], restored["disk"]) > 10


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("seed", broad(range(300), keep=range(4)))
def test_memory_that_is_given_back_holds_nothing_of_use(seed: int, kept: bool) -> None:
    """The same while caches give way at any moment, and pages that hold nothing are erased."""
    chaos = Chaos(random.Random(seed), 30, 2, kept=kept, states=seed % 3 == 0, short=True)
    chaos.run()
    assert len(chaos.simulation.deltas) == 30
