"""Which of several replicas a call goes to.

Owns the rules; sees digests and how much each replica has to do, never what it has cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import count

from lab.options import Routing
from lab.trace import TracedCall

SLACK, FEW = 1.25, 4.0
"""`bounded` passes a replica over that has more than so many times the mean to do, and more than a
few calls.
"""


class Router:
    """`affinity` is rendezvous hashing on a call's first picture: the one whose place in the prompt
    a growing chat does not change.

    A call without pictures goes by its chat.
    """

    def __init__(self, routing: Routing, replicas: int, seed: int) -> None:
        self._routing = routing
        self._replicas = replicas
        self._dice = random.Random(seed)
        self._turn = count()

    def choose(self, call: TracedCall, session: int, loads: Sequence[float]) -> int:
        """`loads`: by replica, in any unit that is at least 1 where it has a whole call to do."""
        if self._replicas == 1:
            return 0
        if self._routing == "random":
            return self._dice.randrange(self._replicas)
        if self._routing == "round-robin":
            return next(self._turn) % self._replicas
        shown = next((piece.shown for piece in call.pieces if piece.shown is not None), None)
        name = (
            session.to_bytes(8, "big")
            if shown is None
            else shown.image.key.digest + call.tenant.encode()
        )
        order = ranking(name, self._replicas)
        if self._routing == "affinity":
            return order[0]
        bound = max(FEW, SLACK * sum(loads) / self._replicas)
        return next((replica for replica in order if loads[replica] <= bound), order[0])


@lru_cache(1 << 16)
def ranking(name: bytes, replicas: int) -> tuple[int, ...]:
    """All replicas, by their weight for `name`, heaviest first: when one goes, only what was its
    own moves.
    """
    weights = [
        (blake2b(name + replica.to_bytes(4, "big"), digest_size=8).digest(), replica)
        for replica in range(replicas)
    ]
    return tuple(replica for _, replica in sorted(weights, reverse=True))
