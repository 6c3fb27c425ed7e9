"""Simulation step by step: calls come, replicas take their steps, chats go on when answered.

Owns the clock (ms) and the order of events. Knows nothing of a step's cost, and of tables.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from saccade.core.types import Delta, ImageKey, Request, SamplingParams
from saccade.edge.rank import rank
from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.options import Routing
from saccade_bench.lab.outcome import Outcome, Served, StepCounts, tiers
from saccade_bench.lab.page_tiers import page_tiers
from saccade_bench.lab.replica import Replica
from saccade_bench.lab.trace import RequestTrace, TracedCall, text_tokens, tokens_of
from saccade_bench.load.measure import Distribution

Event = tuple[
    float, int, Literal["call", "submit", "pixels", "step"], int, int, ImageKey | Request | None
]
"""When; a number that keeps the order of what happens at one time; what; two whole numbers; what it
is about.

call: chat, round. submit, pixels, step: replica, nothing.
"""


@dataclass(slots=True)
class _Live:
    """A call on its way."""

    call: TracedCall
    session: int
    round: int
    replica: int
    sent: float
    first: float = 0.0
    cached: int = 0


class SimulatedRouter:
    """`affinity` ranks by a call's first image, and a call without images by its chat; `random` by
    a meaningless key, as `--affinity none`. Both pass over servers beyond their share.
    """

    def __init__(self, routing: Routing, names: Sequence[str], seed: int) -> None:
        """`names`: the servers', by which `rank` distinguishes them."""
        self._routing = routing
        self._names = tuple(names)
        self._places = {name: place for place, name in enumerate(names)}
        self._dice = random.Random(seed)
        self._turn = count()

    def choose(self, call: TracedCall, session: int, loads: Sequence[int]) -> int:
        """The server's index in `names`. `loads`: number of calls at each."""
        if len(self._names) == 1:
            return 0
        if self._routing == "round-robin":
            return next(self._turn) % len(self._names)
        key = self._dice.randbytes(8) if self._routing == "random" else bearing(call, session)
        load = dict(zip(self._names, loads, strict=True))
        return self._places[rank((key,), self._names, load)[0]]


def bearing(call: TracedCall, session: int) -> bytes:
    """The stand-in for the key of `saccade.route.affinity`."""
    shown = next((piece.shown for piece in call.pieces if piece.shown is not None), None)
    return session.to_bytes(8, "big") if shown is None else shown.image.key.digest


class Stepwise:
    """One run of a trace; `run` it once."""

    def __init__(
        self,
        trace: RequestTrace,
        machine: Machine,
        costs: Costs,
        names: Sequence[str] = ("",),
        routing: Routing = "random",
    ) -> None:
        """`names`: of the replicas."""
        self._trace = trace
        self._costs = costs
        self._routing = routing
        self._replicas = [Replica(machine, costs) for _ in names]
        self._router = SimulatedRouter(routing, names, seed=0)
        self._events: list[Event] = []
        self._number = count()
        self._live: dict[int, _Live] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        self._waiting: deque[int] = deque()  # chats that may not begin yet
        self._open = 0
        self._served: list[Served] = []
        self._counts = StepCounts()

    def run(self, told: Callable[[], None] | None = None) -> Outcome:
        """`told` is called whenever a request has ended."""
        for session in range(self._trace.sessions):
            self._push(self._trace.start(session), "call", session, 0)
        now = 0.0
        while self._events:
            now, _, kind, first, second, about = heapq.heappop(self._events)
            if kind == "call":
                self._call(first, second, now)
                continue
            replica = self._replicas[first]
            deltas: list[Delta] = []
            if kind == "submit":
                assert isinstance(about, Request)
                deltas = replica.submit(about)
            elif kind == "pixels":
                assert isinstance(about, ImageKey)
                replica.arrived(about)
            else:
                deltas = replica.end(self._answers)
            for delta in deltas:
                self._take(delta, now, told)
            self._go_on(first, now)
        assert not self._live, "nothing more can happen, but calls are unanswered"
        return self._outcome(now)

    def _push(
        self,
        when: float,
        kind: Literal["call", "submit", "pixels", "step"],
        first: int,
        second: int,
        about: object = None,
    ) -> None:
        assert about is None or isinstance(about, ImageKey | Request)
        heapq.heappush(self._events, (when, next(self._number), kind, first, second, about))

    def _call(self, session: int, round: int, now: float) -> None:
        if round == 0:
            if self._trace.limit is not None and self._open >= self._trace.limit:
                self._waiting.append(session)
                return
            self._open += 1
        call = self._trace.call(session, round)
        chosen = self._router.choose(call, session, [replica.calls for replica in self._replicas])
        number = next(self._number)
        tokens, spans, images = tokens_of(call)
        self._answers[number] = tuple(text_tokens(call.answer))
        sampling = SamplingParams(max_tokens=call.answer.length, ignore_eos=True, seed=number)
        self._live[number] = _Live(call, session, round, chosen, now)
        self._replicas[chosen].calls += 1
        self._counts.images += len(images)
        pictures = call.pictures
        self._replicas[chosen].pixels.name(pictures)
        prepared = (
            self._costs.request + sum(shown.pixels for shown in pictures) * self._costs.seen / 1e6
        )
        self._push(
            now + prepared,
            "submit",
            chosen,
            0,
            Request(str(number), tokens, spans, images, sampling, call.tenant),
        )

    def _go_on(self, number: int, now: float) -> None:
        """Begin the next step if none is under way, and have the pixels brought that are asked
        for.
        """
        replica = self._replicas[number]
        if not replica.stepping and (end := replica.begin(now)) is not None:
            self._push(end, "step", number, 0)
        for when, key in replica.wanted(now):
            self._push(when, "pixels", number, 0, key)

    def _take(self, delta: Delta, now: float, told: Callable[[], None] | None) -> None:
        number = int(delta.id)
        live = self._live[number]
        if delta.tokens and not live.first:
            live.first, live.cached = now, delta.cached_tokens
        if delta.finish is None:
            return
        del self._live[number], self._answers[number]
        self._replicas[live.replica].calls -= 1
        self._counts.requests += 1
        if told:
            told()
        rounds = self._trace.rounds(live.session)
        if delta.finish == "error":
            self._counts.refused += 1
            rounds = 0
        else:
            self._served.append(_served(live, now))
        if live.round + 1 < rounds:
            self._push(
                now + self._trace.pause(live.session, live.round + 1),
                "call",
                live.session,
                live.round + 1,
            )
            return
        self._open -= 1
        if self._waiting:
            self._push(now, "call", self._waiting.popleft(), 0)

    def _outcome(self, now: float) -> Outcome:
        for replica in self._replicas:
            self._counts.add(replica.counts())
        return Outcome(
            routing=self._routing if len(self._replicas) > 1 else None,
            duration=now,
            busy=tuple(replica.busy / now if now else 0.0 for replica in self._replicas),
            counts=self._counts,
            tiers=tiers(replica.embeddings for replica in self._replicas),
            ttft=Distribution.of([served.ttft for served in self._served]),
            page_tiers=page_tiers(self._replicas),
            different=len(set().union(*(replica.pixels.named for replica in self._replicas))),
            served=tuple(self._served),
        )


def _served(live: _Live, now: float) -> Served:
    call = live.call
    pace = (now - live.first) / (call.answer.length - 1) if call.answer.length > 1 else None
    return Served(
        live.session,
        live.round,
        live.replica,
        call.length,
        live.cached,
        live.first - live.sent,
        pace,
    )
