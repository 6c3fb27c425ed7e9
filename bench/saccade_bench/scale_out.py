"""What a filter of held digests, and a claim on an image that is being encoded, would save a fleet
that ranks by digest: two questions about pieces that Saccade leaves out, put to the simulator.

    python -m saccade_bench.scale_out          # a few minutes of one core

1. A third server joins two in the middle of a trace. A router that ranks by digest sends it a third
of the images, which it encodes once again; one that knows who holds what (here a filter that is
never wrong and never old, the best there could be) sends them where they are.
2. Servers share a store, and requests are spread at random: how often do two encode one image,
because neither sees what the other has not yet written?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from saccade.core.types import ImageKey
from saccade.edge.rank import most, rank
from saccade_bench.lab import quick
from saccade_bench.lab.costs import PROFILES
from saccade_bench.lab.options import Routing, TraceOptions
from saccade_bench.lab.policies import POLICIES
from saccade_bench.lab.quick import QueuedServer
from saccade_bench.lab.router import bearing
from saccade_bench.lab.sharing import Shared, SimulatedStore
from saccade_bench.lab.trace import Synthetic, TracedCall

PROFILE = PROFILES["h200"]
GRAIN = 128
STORE_BYTES = 1 << 40
RATE = 15.0
"""Requests a second for each server."""
REQUESTS = 20_000
NAMES = ("http://a:8000", "http://b:8000", "http://c:8000")


@dataclass
class Scaled:
    """After the third server came. `again`: images encoded though some server had done so."""

    again: int = 0
    encoded: int = 0
    third: int = 0
    requests: int = 0
    waits: list[float] = field(default_factory=list)


class Growing:
    """A fleet that a third server joins."""

    def __init__(self, shared: Shared, knows: bool) -> None:
        """`knows`: the router asks a filter."""
        worth, budgets = POLICIES["saccade"], PROFILE.machine.budgets
        machine = PROFILE.machine
        if shared.store:
            machine = replace(
                machine, budgets=replace(budgets, disk_bytes=STORE_BYTES, shared=True)
            )
        self.servers = {
            name: QueuedServer(machine, PROFILE.costs, GRAIN, worth, shared) for name in NAMES
        }
        self._knows = knows
        self._seen: set[ImageKey] = set()

    def serve(self, call: TracedCall, now: float, names: Sequence[str], found: Scaled) -> None:
        server = self.servers[name := self._choose(call, now, names)]
        before = server.counts.images_encoded
        served = server.serve(call, now)
        assert served is not None
        encoded = server.counts.images_encoded - before
        found.encoded += encoded
        found.again += encoded if call.pictures[0].image.key in self._seen else 0
        found.third += name == NAMES[2]
        found.requests += 1
        found.waits.append(served[0] - now)
        self._seen.add(call.pictures[0].image.key)

    def _choose(self, call: TracedCall, now: float, names: Sequence[str]) -> str:
        load = {name: self.servers[name].load(now) for name in names}
        order = rank((bearing(call, 0),), names, load)
        if not self._knows:
            return order[0]
        key, bound = call.pictures[0].image.key, most([*load.values()])
        holders = [name for name in order if self.servers[name].embeddings.ready(key)]
        return next((name for name in holders if load[name] < bound), order[0])


def scale_out(store: bool, knows: bool, popular: int) -> Scaled:
    """One image per request, a hundredth of them new."""
    wanted = TraceOptions(
        num_prompts=2 * REQUESTS, pictures=popular, repeat_ratio=0.99, rate=2 * RATE
    )
    trace = Synthetic(wanted, PROFILE.machine)
    shared = Shared(SimulatedStore(STORE_BYTES, PROFILE.costs)) if store else Shared()
    fleet, after = Growing(shared, knows), Scaled()
    for session in range(trace.sessions):
        late = session >= REQUESTS
        call, now = trace.call(session, 0), trace.start(session)
        fleet.serve(call, now, NAMES if late else NAMES[:2], after if late else Scaled())
    return after


def twice(servers: int, routing: Routing) -> tuple[int, int]:
    """(different images, images encoded by two servers at once), behind routers without a
    filter.
    """
    wanted = TraceOptions(
        num_prompts=REQUESTS, pictures=2000, repeat_ratio=0.98, rate=servers * RATE
    )
    budgets = replace(PROFILE.machine.budgets, disk_bytes=STORE_BYTES, shared=True)
    machine = replace(PROFILE.machine, budgets=budgets)
    outcome = quick.run(
        Synthetic(wanted, machine),
        machine,
        PROFILE.costs,
        GRAIN,
        [f"http://server-{number}:8000" for number in range(servers)],
        routing,
        shared=Shared(SimulatedStore(STORE_BYTES, PROFILE.costs)),
    )
    return outcome.different, outcome.twice


def main() -> None:
    print(f"ESTIMATES ({PROFILE.source})\n")
    print(f"A third server joins two; the {REQUESTS} requests that follow:")
    print("images  store filter  encoded  again  at the third  TTFT mean, P99")
    for popular in (400, 2000):
        for store in (False, True):
            for knows in (False, True):
                found = scale_out(store, knows, popular)
                mean, last = np.mean(found.waits), np.percentile(found.waits, 99)
                print(
                    f"{popular:6} {store!s:>6} {knows!s:>6} {found.encoded:8} {found.again:6} "
                    f"{found.third / found.requests:13.0%} {mean:7.0f}, {last:.0f} ms"
                )
    print("\nA shared store; images that two servers encoded at once:")
    for routing in ("random", "affinity"):
        for servers in (2, 4, 8, 16):
            different, both = twice(servers, routing)
            print(f"{routing:>9} {servers:3} servers: {both:4} of {different}")


if __name__ == "__main__":
    main()
