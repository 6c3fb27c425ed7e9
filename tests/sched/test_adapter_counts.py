"""Requests with an adapter are counted by its name, while they run and while they wait."""

from __future__ import annotations

from dataclasses import replace

from saccade.core.metrics import Metrics
from saccade.core.types import AdapterRef, Caching, Request
from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import Simulation

ONE, TWO = AdapterRef(1, "f", name="one"), AdapterRef(2, "g", name="two")


def asked(sim: Simulation, adapter: AdapterRef) -> Request:
    request = sim.request([1] * 5, max_tokens=3)
    return replace(request, caching=Caching(adapter=adapter))


def test_requests_are_counted_by_adapter_and_state() -> None:
    sim, metrics = Simulation(SchedulerLimits(2, 512, 1000, 10_000), 256, 4), Metrics()

    def counts() -> dict[tuple[str, str], float]:
        sim.scheduler.measure(metrics)
        named = {metric.name: values for metric, values in metrics.snapshot().items()}
        found = named["saccade_adapter_requests"]
        return {(name, state): n for (name, state), n in found.items() if n}

    assert counts() == {}
    for adapter in (ONE, AdapterRef(), TWO, TWO):
        sim.add(asked(sim, adapter))
    assert counts() == {("one", "waiting"): 1, ("two", "waiting"): 2}
    sim.finish(sim.plan())
    assert counts() == {("one", "running"): 1, ("two", "waiting"): 2}
    sim.run()
    assert counts() == {}
    sim.check_end()
