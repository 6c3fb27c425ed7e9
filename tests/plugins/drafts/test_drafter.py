"""How much is guessed: as much as pays by the share of right guesses and the cost of a row, and
nothing beside many rows. Counts of steps and rows, priced as `StepCosts` prices them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from saccade.core.plan import Plan
from saccade.plugins.drafts.drafter import (
    BUSY_ROWS,
    END,
    MAX_COST,
    ROW_COST,
    Drafter,
    Speculation,
    StepCosts,
    last_match,
    worthwhile,
)
from saccade.sched.limits import DraftLimits, SchedulerLimits
from saccade.sched.sequence import Sequence
from tests.sched.simulator import VOCABULARY, Simulation, guess_with, reference

TOKENS = 80


class Prophet(Drafter):
    """Finds a guess for every token, of which the first `wrong` of an answer, and after these one
    in `period`, are wrong; 0: none of these.
    """

    def __init__(self, simulation: Simulation, wrong: int, period: int) -> None:
        super().__init__(7)
        self.costs = StepCosts(clock=lambda: 0.0)
        self._simulation = simulation
        self._wrong, self._period = wrong, period

    def _find(self, sequence: Sequence, speculation: Speculation, count: int) -> list[int]:
        answer = reference(sequence.request, self._simulation.scheduler.token_limit)[0]
        first = sequence.output_length
        return [
            (token + self._is_wrong(place)) % VOCABULARY
            for place, token in enumerate(answer[first : first + count], first)
        ]

    def _is_wrong(self, place: int) -> bool:
        return place < self._wrong or (self._period > 0 and place % self._period == 0)


@dataclass
class Work:
    """What answers take. cost: in steps of one row. rows: without those of drafts."""

    cost: float = 0.0
    plans: int = 0
    rows: int = 0
    drafts: int = 0

    def add(self, plan: Plan) -> None:
        drafts = sum(row.draft for row in plan.rows)
        self.cost += plan.steps * (1 + ROW_COST * (len(plan.rows) - 1)) * bool(plan.rows)
        self.plans += 1
        self.rows += plan.steps * (len(plan.rows) - drafts)
        self.drafts += drafts


def serve(
    streams: int,
    *,
    rounds: int = 1,
    drafts: int = 7,
    wrong: int = 0,
    period: int = 0,
    tokens: int = TOKENS,
    plan_steps: int = 1,
) -> tuple[Work, Prophet]:
    """What answers to so many sequences at once take, and who guessed."""
    limits = SchedulerLimits(
        64,
        512,
        1000,
        10_000,
        32,
        256,
        1 << 40,
        drafts=DraftLimits(drafts),
        plan_steps=plan_steps,
    )
    sim = Simulation(limits, 1024, 4, in_flight=2)
    prophet = Prophet(sim, wrong, period)
    if drafts:
        guess_with(sim.scheduler, prophet)
    work = Work()
    for turn in range(rounds):
        for stream in range(streams):
            prompt = [1 + stream, 1 + turn, 2, 3]
            sim.add(sim.request(prompt, ignore_eos=True, max_tokens=tokens))
        while not sim.scheduler.idle:
            while len(sim.flights) < 2 and not (plan := sim.plan()).empty:
                work.add(plan)
            if sim.flights:
                sim.finish(sim.flights[0][0])
    sim.check_end()
    return work, prophet


@pytest.mark.first
@pytest.mark.parametrize("streams", [1, 2, 8])
def test_drafts_that_are_never_accepted_take_one_try(streams: int) -> None:
    """All else is as without drafts: plans of several steps, and the same rows."""
    tokens = 400
    without, _ = serve(streams, tokens=tokens, plan_steps=8, drafts=0)
    with_them, prophet = serve(streams, tokens=tokens, plan_steps=8, wrong=tokens)
    assert without.plans < tokens / 8 + 10
    assert with_them.rows == without.rows
    assert prophet.proposed.total() == with_them.drafts <= 7 * streams
    assert with_them.drafts <= 0.02 * without.rows
    assert with_them.plans <= without.plans + 3 * streams
    assert (with_them == without) == (streams > BUSY_ROWS)


def test_later_answers_do_not_even_try() -> None:
    work, prophet = serve(1, rounds=10, plan_steps=8, wrong=TOKENS)
    without, _ = serve(1, rounds=10, plan_steps=8, drafts=0)
    assert prophet.proposed.total() <= 7 * 4 and work.plans <= without.plans + 3 * 4


def test_right_guesses_cancel_a_plan_of_several_steps() -> None:
    """Whatever is found in the middle of a plan is tried as soon as without such plans."""
    single, _ = serve(1, wrong=40, tokens=160)
    several, prophet = serve(1, wrong=40, tokens=160, plan_steps=8)
    without, _ = serve(1, tokens=160, plan_steps=8, drafts=0)
    assert prophet.accepted.total() > 80 and several.plans < single.plans
    assert several.cost < 0.7 * without.cost


@pytest.mark.parametrize("wrong, period", [(TOKENS, 0), (0, 2), (0, 3)])
@pytest.mark.parametrize("streams", [8, 16])
def test_nothing_is_guessed_beside_busy_rows_if_guesses_are_often_wrong(
    streams: int, wrong: int, period: int
) -> None:
    _, prophet = serve(streams, wrong=wrong, period=period)
    assert prophet.proposed.total() == 0


@pytest.mark.first
@pytest.mark.parametrize("streams", [1, 2, 8, 32])
@pytest.mark.parametrize("period", [0, 2, 8])
def test_guesses_cost_no_stream_more_than_3_in_100(streams: int, period: int) -> None:
    without, _ = serve(streams, drafts=0)
    with_them, _ = serve(streams, period=period)
    assert with_them.cost <= 1.03 * without.cost


@pytest.mark.more
def test_guesses_that_are_never_right_cost_one_stream_less_than_1_in_100() -> None:
    without, _ = serve(1, rounds=10, drafts=0)
    with_them, prophet = serve(1, rounds=10, wrong=TOKENS)
    assert prophet.proposed.total() > 0 and with_them.cost <= 1.01 * without.cost


def test_right_guesses_are_worth_it_alone_and_beside_a_few() -> None:
    for streams, least in ((1, 4.0), (2, 2.0)):
        without, _ = serve(streams, drafts=0)
        with_them, prophet = serve(streams)
        assert without.cost > least * with_them.cost and prophet.accepted == prophet.proposed


@pytest.mark.parametrize("count", [1, 3, 7])
def test_an_answer_that_repeats_itself_is_followed_before_its_end(count: int) -> None:
    answer = np.array([1, 2, *[9] * 20, END], np.int32)
    matched, place = last_match(answer, answer[-9:-1], count)
    assert matched == 8 and answer[place : place + count].tolist() == [9] * count
    assert last_match(answer[-9:], answer[-9:-1], count)[0] < 8, "nothing follows all eight"


def test_guesses_begin_again_once_they_would_be_right_without_a_wrong_row() -> None:
    """Those that are not worth a row are compared with what is drawn."""
    _, prophet = serve(1, wrong=40)
    wrong = prophet.proposed.total() - prophet.accepted.total()
    assert prophet.accepted.total() > 15 and wrong < 35


def test_no_guess_is_worth_a_row_that_costs_a_step() -> None:
    assert worthwhile(1.0, 7, 1, ROW_COST) == 7
    assert worthwhile(1.0, 7, 1, MAX_COST) == 0
    assert worthwhile(0.1, 7, 1, ROW_COST) == 0


@pytest.mark.parametrize("price", [0.01, 0.06, 0.5])
def test_the_cost_of_a_row_is_measured(price: float) -> None:
    costs = StepCosts()
    assert costs.row == ROW_COST
    for rows in (1, 8, 4, 16, 1, 8, 2, 8) * 30:
        costs.note(rows, 0.05 * (1 + price * (rows - 1)))
    assert costs.row == pytest.approx(price, rel=0.2)
    for _ in range(1000):
        costs.note(1, 0.05)  # what was measured long ago is forgotten
    assert costs.row == pytest.approx(ROW_COST, rel=0.05)
