"""Prompts that are interrupted, or run with two plans begun: shared by tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from saccade.core.plan import Plan
from saccade.core.types import Request
from saccade.runtime.inflight_step import Step
from saccade.runtime.worker import Worker
from tests.fixtures.harness import Harness, Outcome


def preempt_each_once(harness: Harness, preempted: set[str]) -> Callable[[Plan], None]:
    """Return a hook between steps that preempts each request once, in the middle of its prompt."""

    def interrupt(_: Plan) -> None:
        scheduler = harness.scheduler
        for sequence in tuple(scheduler.running):
            id, run = sequence.request.id, sequence.run
            if run and id not in preempted and run.computed > 8:
                preempted.add(id)
                scheduler._preempt(sequence)
                scheduler.waiting.put_back(sequence)

    return interrupt


def run_two_begun(harness: Harness, requests: Sequence[Request]) -> Mapping[str, Outcome]:
    """Run requests as a server does: a step is begun before the one before it has a result."""
    assert isinstance(harness.worker, Worker)
    outcomes = {request.id: Outcome() for request in requests}
    for request in requests:
        harness.scheduler.add_request(request)
    flights: deque[Step] = deque()
    while not harness.scheduler.idle or flights:
        harness._answer_notices()
        plan = harness.scheduler.plan() if len(flights) < 2 else None
        if plan and not plan.empty:
            flights.append(harness.worker.begin_step(plan))
            if len(flights) < 2:
                continue
        for delta in harness.scheduler.apply(flights.popleft().result()):
            harness._note(outcomes[delta.id], delta)
    return outcomes
