"""Plans of several steps on the real scheduler and worker: answers are those of a step to a plan,
whatever comes, leaves or ends in the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.core.config import SnapshotConfig
from saccade.core.plan import Plan
from saccade.core.types import Caching, Delta, Request
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.tiny import make_checkpoint

STEPS = 8
PROMPT = tuple(range(5, 34))
Events = Mapping[int, Sequence[Request | str]]
"""By step: a request that comes, or the id of one whose client leaves."""


def load(folder: Path, family: str) -> FamilyNet:
    set_threads()
    make_checkpoint(folder, family)
    device = torch.device("cpu")
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=device)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> FamilyNet:
    return load(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


@pytest.fixture(scope="module", params=["dense", "hybrid", "lfm2_vl"])
def net(
    request: pytest.FixtureRequest, hybrid: FamilyNet, tmp_path_factory: pytest.TempPathFactory
) -> FamilyNet:
    """A model with keys and values alone, and two that also keep states."""
    if request.param == "hybrid":
        return hybrid
    family = "qwen3_vl" if request.param == "dense" else request.param
    return load(tmp_path_factory.mktemp("steps"), family)


class Served:
    """A harness whose steps are carried out as a server does, with two plans in flight."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.outcomes: dict[str, Outcome] = {}
        self.plans = 0
        self.halts = 0
        self.skipped = 0  # plans of which no step was carried out
        self.first: dict[str, int] = {}  # steps until each request's first token
        self._flights: deque[Plan] = deque()
        self._steps = 0  # of the newest plan

    def run(self, events: Events) -> dict[str, Outcome]:
        scheduler, step, due = self.harness.scheduler, 0, dict(events)
        came: dict[str, int] = {}
        while due or self._flights or not scheduler.idle:
            for event in due.pop(step, ()):
                if isinstance(event, Request):
                    self.outcomes[event.id], came[event.id] = Outcome(), step
                    self._note(scheduler.add_request(event))
                else:
                    self._note(scheduler.abort(event))
            self._halt()
            while len(self._flights) < 2 and not (plan := scheduler.plan()).empty:
                self._flights.append(plan)
                self.plans += 1
                self._steps = plan.steps
            if self._flights:
                self._carry_out(self._flights.popleft())
            scheduler.audit()
            step += 1
            for id, outcome in self.outcomes.items():
                if outcome.tokens:
                    self.first.setdefault(id, step - came[id])
        return self.outcomes

    def _carry_out(self, plan: Plan) -> None:
        if plan.steps > 1:
            self._flights.appendleft(plan.rest)
        self._note(self.harness.scheduler.apply(self.harness.worker.execute(plan)))
        self._halt()

    def _halt(self) -> None:
        if self.harness.scheduler.take_cancel():
            self.halts += 1
            self.skipped += self._flights[-1].steps == self._steps
            self._flights[-1] = replace(self._flights[-1], steps=0)

    def _note(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.harness._note(self.outcomes[delta.id], delta)


def request(harness: Harness, id: str, prompt: int = 20, **sampling: Any) -> Request:
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": len(id) + prompt, "logprobs": 2}
    made = harness.request(id, PROMPT[:prompt], **{**asked, **sampling})
    return replace(made, streamed=True)


def served(net: FamilyNet, steps: int, **config: Any) -> Served:
    return Served(Harness(net, plan_steps=steps, page_size=4, **config))


@pytest.mark.parametrize("pages", [512, 18], ids=["roomy", "preempted"])
def test_answers_are_those_of_single_steps(net: FamilyNet, pages: int) -> None:
    found = []
    for steps in (1, STEPS):
        with_steps = served(net, steps, kv_pages=pages)
        made = with_steps.harness
        events: Events = {
            0: [request(made, "a"), request(made, "b", max_tokens=9, frequency_penalty=1.0)],
            13: [request(made, "c", 24, seed=3)],
            15: [request(made, "gone", 9)],
            22: ["gone"],
            31: [request(made, "dd", 20, temperature=0.0)],
        }
        with_steps.run(events)
        outcomes = with_steps.outcomes
        assert outcomes.pop("gone").finish == ["abort"]
        assert {each.finish[0] for each in outcomes.values()} == {"length"}
        assert outcomes["dd"].cached_tokens > 0 or pages == 18
        found.append({id: each.tokens for id, each in outcomes.items()})
        for each in outcomes.values():
            assert [one.token for one in each.logprobs] == each.tokens
        assert (with_steps.halts > 0) == (steps > 1)
        assert (made.scheduler.counts.preemptions > 0) == (pages == 18)
    assert found[0] == found[1]


def test_an_answer_ends_at_its_last_token(net: FamilyNet) -> None:
    """A token that ends it is seen after the steps behind it were planned."""
    alone = served(net, 1)
    tokens = alone.run({0: [request(alone.harness, "a")]})["a"].tokens
    for place in (3, 10, 11, 12):
        several = served(net, STEPS)
        wanted = request(several.harness, "a", stop_token_ids=(tokens[place],))
        outcome = several.run({0: [wanted]})["a"]
        assert outcome.tokens == tokens[: tokens.index(tokens[place]) + 1]
        assert outcome.finish == ["stop"]
        used = several.harness.scheduler.counts.steps
        assert used <= len(outcome.tokens) + 3, "one step is in vain, and one closes the slot"


def test_rows_that_only_decode_share_a_plan_for_several_steps(net: FamilyNet) -> None:
    plans = {}
    for steps in (1, STEPS):
        several = served(net, steps)
        several.run({0: [request(several.harness, "a", max_tokens=65)]})
        plans[steps] = several.plans
    assert plans[1] >= 65 and plans[STEPS] <= 4 + 64 // STEPS


def test_a_chat_resumes_from_an_answer_in_plans_of_several_steps(net: FamilyNet) -> None:
    """Whenever another request cancels a plan: no cached state has seen a token too many."""
    alone = served(net, 1)
    told = alone.run({0: [request(alone.harness, "a", max_tokens=75)]})["a"].tokens
    cold = Harness(net, prefix_cache=False)
    chat = [*PROMPT[:20], *told[:68]]
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 4}
    wanted = cold.run([cold.request("chat", chat, **asked)])["chat"].tokens
    for at in (40, 47, 48, 49, 50, 63, 64, 65, 66, 67):
        several = served(net, STEPS)
        made = several.harness
        events: Events = {0: [request(made, "a", max_tokens=75)], at: [request(made, "b", 9)]}
        assert several.run(events)["a"].tokens == told
        assert several.plans < 75
        found = made.run([made.request("chat", chat, **asked)])["chat"]
        assert found.tokens == wanted and found.cached_tokens >= 64


def test_a_plan_skipped_as_a_whole_leaves_no_snapshot(hybrid: FamilyNet) -> None:
    """Its first step would have reached a place for one, and memory for another is short."""
    prompt = [*PROMPT, *PROMPT, *PROMPT][:63]
    several = served(hybrid, STEPS, snapshots=SnapshotConfig(1, 256, between=0))
    made = several.harness
    first = replace(made.request("a", prompt, max_tokens=7), streamed=True)
    several.run({0: [first], 2: [request(made, "b", 9, max_tokens=2)]})
    assert several.skipped == 1
    chat, cold = [*prompt, *several.outcomes["a"].tokens], Harness(hybrid, prefix_cache=False)
    wanted = cold.run([cold.request("chat", chat, max_tokens=4)])["chat"]
    found = made.run([made.request("chat", chat, max_tokens=4)])["chat"]
    assert found.tokens == wanted.tokens and found.cached_tokens == 64


def test_who_comes_waits_for_the_step_in_flight_alone(net: FamilyNet) -> None:
    for at in range(12, 22):
        several = served(net, STEPS)
        made = several.harness
        events: Events = {0: [request(made, "a")], at: [request(made, "later", 9)]}
        several.run(events)
        assert several.first["later"] <= 3, "a step in flight, what was skipped, its own"


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_guesses_and_plans_of_several_steps_go_together(
    net: FamilyNet, rows: int, temperature: float
) -> None:
    """Where no draft is accepted, all is as without drafts but for one try. With seven other rows
    none is made.
    """
    tokens, found = 120, []
    for drafts in (0, 7):
        each = Served(Harness(net, drafts=drafts, plan_steps=STEPS, max_running=16))
        asked: dict[str, Any] = {"temperature": temperature, "max_tokens": tokens}
        each.run({0: [request(each.harness, "a" * row, 9 + row, **asked) for row in range(rows)]})
        found.append(each)
    off, on = found
    assert {id: each.tokens for id, each in on.outcomes.items()} == {
        id: each.tokens for id, each in off.outcomes.items()
    }
    drafter = on.harness.drafter
    guessed, right = (each.total() for each in (drafter.proposed, drafter.accepted))
    steps, without = (each.harness.scheduler.counts.steps for each in (on, off))
    assert guessed <= (7 + 2 * right if rows == 1 else 0)
    assert on.plans <= off.plans + 3 * (1 + right) and steps <= without


def test_a_guess_found_in_the_middle_of_a_plan_cancels_the_rest(net: FamilyNet) -> None:
    """After a wrong token of a prediction, guesses begin again as soon as tokens match."""
    plain = served(net, STEPS)
    tokens = plain.run({0: [request(plain.harness, "a", max_tokens=90)]})["a"].tokens
    predicted = [token + (place == 40) for place, token in enumerate(tokens)]
    guessing = served(net, STEPS, drafts=7)
    caching = Caching(prediction=tuple(predicted))
    wanted = replace(request(guessing.harness, "a", max_tokens=90), caching=caching)
    assert guessing.run({0: [wanted]})["a"].tokens == tokens
    accepted = guessing.harness.drafter.accepted["prediction"]
    assert guessing.halts == 1 and accepted > 60
    assert guessing.harness.scheduler.counts.steps <= 90 - accepted + 5
