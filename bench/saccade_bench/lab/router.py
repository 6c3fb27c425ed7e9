"""Which of several servers a simulated call goes to: what `saccade route` would say, by its own
function.

Owns what stands in for a request's bearing; sees digests and how many calls each server has, never
what it has cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from saccade.edge.rank import rank
from saccade_bench.lab.options import Routing
from saccade_bench.lab.trace import TracedCall


class SimulatedRouter:
    """`affinity` ranks by a call's first image, and a call without images by its chat; `random` by
    a key that says nothing, as `--affinity none`. Both pass over who has more than its share.
    """

    def __init__(self, routing: Routing, names: Sequence[str], seed: int) -> None:
        """`names`: the servers', by which `rank` tells them apart."""
        self._routing = routing
        self._names = tuple(names)
        self._places = {name: place for place, name in enumerate(names)}
        self._dice = random.Random(seed)
        self._turn = count()

    def choose(self, call: TracedCall, session: int, loads: Sequence[int]) -> int:
        """The server's place in `names`. `loads`: calls that each of them has."""
        if len(self._names) == 1:
            return 0
        if self._routing == "round-robin":
            return next(self._turn) % len(self._names)
        key = self._dice.randbytes(8) if self._routing == "random" else bearing(call, session)
        load = dict(zip(self._names, loads, strict=True))
        return self._places[rank((key,), self._names, load)[0]]


def bearing(call: TracedCall, session: int) -> bytes:
    """What stands for the key of `saccade.route.affinity`."""
    shown = next((piece.shown for piece in call.pieces if piece.shown is not None), None)
    return session.to_bytes(8, "big") if shown is None else shown.image.key.digest
