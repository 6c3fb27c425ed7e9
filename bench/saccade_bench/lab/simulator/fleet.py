"""Run a trace on simulated servers: requests arrive, replicas run steps, and chats continue when
they are answered. The clock is in ms.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from saccade.core.types import Delta, Request, SamplingParams
from saccade.edge.rank import rank
from saccade_bench.lab.options import Routing
from saccade_bench.lab.simulator.costs import Costs, Machine
from saccade_bench.lab.simulator.replica import Replica, Tiers
from saccade_bench.lab.simulator.traces import RequestTrace, TracedCall, text_tokens, tokens_of
from saccade_bench.load.measure import Distribution


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request. Times are in ms. `tpot` is None for answers of one token."""

    session: int
    round: int
    replica: int
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    tpot: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a trace: counts over all replicas, which are exact, and estimated times.

    Images found in a cache are counted by its level (`images_kv`, `images_embedding`).
    `pixels_reused` counts images that were encoded again, but not decoded.
    """

    routing: Routing | None
    # times
    duration: float  # ms
    busy: tuple[float, ...]  # fraction of the duration in which each replica computed
    ttft: Distribution
    # counts
    counts: Counter[str]
    moved: Counter[str]  # bytes, by source and target
    tiers: Tiers  # of embeddings
    page_tiers: Tiers
    different: int  # number of distinct images sent
    served: tuple[Served, ...]

    @property
    def encodes(self) -> float:
        """Encodes per distinct image."""
        return self.counts["images_encoded"] / max(1, self.different)


@dataclass(slots=True)
class _Live:
    """A request in flight."""

    call: TracedCall
    session: int
    round: int
    replica: int
    sent: float
    first: float = 0.0
    cached: int = 0


class SimulatedRouter:
    """Chooses a server for each request.

    "affinity" ranks servers by a request's first image, or by its chat if it has none. "random"
    ranks by a random key, as `--affinity none`. Both skip overloaded servers. "round-robin" cycles
    through the servers.
    """

    def __init__(self, routing: Routing, names: Sequence[str], seed: int) -> None:
        """`names` are the servers' names, on which the ranking depends."""
        self._routing = routing
        self._names = tuple(names)
        self._indices = {name: index for index, name in enumerate(names)}
        self._dice = random.Random(seed)
        self._turn = count()

    def choose(self, call: TracedCall, session: int, loads: Sequence[int]) -> int:
        """Return the server's index in `names`. `loads` are the requests in flight at each."""
        if len(self._names) == 1:
            return 0
        if self._routing == "round-robin":
            return next(self._turn) % len(self._names)
        # the same key as in `saccade.plugins.route.affinity`
        first = next(iter(call.pictures), None)
        affine = session.to_bytes(8, "big") if first is None else first.image.key.digest
        key = self._dice.randbytes(8) if self._routing == "random" else affine
        load = dict(zip(self._names, loads, strict=True))
        return self._indices[rank((key,), self._names, load)[0]]


class Simulation:
    """One run of a trace. Call `run` once."""

    def __init__(
        self,
        trace: RequestTrace,
        machine: Machine,
        costs: Costs,
        names: Sequence[str] = ("",),
        routing: Routing = "random",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`names` are the names of the replicas. `on_end` is called whenever a request has
        ended.
        """
        self._on_end = on_end
        self._trace = trace
        self._costs = costs
        self._routing = routing
        self._replicas = [Replica(machine, costs) for _ in names]
        self._router = SimulatedRouter(routing, names, seed=0)
        # Time, a sequence number that orders events at the same time, and the event.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._live: dict[int, _Live] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        self._waiting: deque[int] = deque()  # chats that wait for the concurrency limit
        self._open = 0
        self._served: list[Served] = []
        self._counts: Counter[str] = Counter(requests=0, refused=0, images=0)

    def run(self) -> Outcome:
        for session in range(self._trace.sessions):
            self._call_at(self._trace.start(session), session, 0)
        now = 0.0
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        assert not self._live, "nothing more can happen, but calls are unanswered"
        return self._outcome(now)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), happen))

    def _at_replica(self, when: float, index: int, work: Callable[[], Iterable[Delta]]) -> None:
        """At time `when`, change a replica by `work`, process its deltas, and let it continue: it
        starts a step if none is in flight, and decodes the images that it requests.
        """

        def happen(now: float) -> None:
            for delta in work():
                self._take(delta, now)
            replica = self._replicas[index]
            if not replica.stepping and (end := replica.begin(now)) is not None:
                self._at_replica(end, index, lambda: replica.end(self._answers))
            for arrival, key in replica.wanted(now):
                self._at_replica(arrival, index, partial(replica.arrived, key))

        self._at(when, happen)

    def _call_at(self, when: float, session: int, round: int) -> None:
        self._at(when, lambda now: self._call(session, round, now))

    def _call(self, session: int, round: int, now: float) -> None:
        if round == 0:
            if self._trace.limit is not None and self._open >= self._trace.limit:
                self._waiting.append(session)
                return
            self._open += 1
        call = self._trace.call(session, round)
        chosen = self._router.choose(call, session, [replica.calls for replica in self._replicas])
        number, replica = next(self._number), self._replicas[chosen]
        tokens, spans, images = tokens_of(call)
        self._answers[number] = tuple(text_tokens(call.answer))
        self._live[number] = _Live(call, session, round, chosen, now)
        self._counts["images"] += len(images)
        replica.calls += 1
        replica.shown.update((shown.image.key, shown) for shown in call.pictures)
        sampling = SamplingParams(max_tokens=call.answer.length, ignore_eos=True, seed=number)
        request = Request(str(number), tokens, spans, images, sampling, call.tenant)
        pixels = sum(shown.pixels for shown in call.pictures)
        prepared = now + self._costs.request + pixels * self._costs.seen / 1e6
        self._at_replica(prepared, chosen, lambda: replica.submit(request))

    def _take(self, delta: Delta, now: float) -> None:
        number = int(delta.id)
        live = self._live[number]
        if delta.tokens and not live.first:
            live.first, live.cached = now, delta.cached_tokens
        if delta.finish is None:
            return
        del self._live[number], self._answers[number]
        self._replicas[live.replica].calls -= 1
        self._counts["requests"] += 1
        self._on_end()
        if delta.finish == "error":
            self._counts["refused"] += 1
        else:
            self._served.append(_served(live, now))
            if (following := live.round + 1) < self._trace.rounds(live.session):
                pause = self._trace.pause(live.session, following)
                self._call_at(now + pause, live.session, following)
                return
        self._open -= 1
        if self._waiting:
            self._call_at(now, self._waiting.popleft(), 0)

    def _outcome(self, now: float) -> Outcome:
        replicas = self._replicas
        moved: Counter[str] = Counter()
        for replica in replicas:
            self._counts.update(replica.counts())
            moved.update(replica.moved)
        return Outcome(
            routing=self._routing if len(replicas) > 1 else None,
            duration=now,
            busy=tuple(replica.busy / now if now else 0.0 for replica in replicas),
            ttft=Distribution.of([served.ttft for served in self._served]),
            counts=self._counts,
            moved=moved,
            tiers=_sum(replica.embedding_tiers() for replica in replicas),
            page_tiers=_sum(replica.page_tiers() for replica in replicas),
            different=len(set().union(*(replica.shown for replica in replicas))),
            served=tuple(self._served),
        )


def _sum(tiers: Iterable[Tiers]) -> Tiers:
    total: Tiers = {}
    for each in tiers:
        for name, counts in each.items():
            total.setdefault(name, Counter()).update(counts)
    return total


def _served(live: _Live, now: float) -> Served:
    answer = live.call.answer.length
    return Served(
        live.session,
        live.round,
        live.replica,
        live.call.length,
        live.cached,
        live.first - live.sent,
        (now - live.first) / (answer - 1) if answer > 1 else None,
    )
