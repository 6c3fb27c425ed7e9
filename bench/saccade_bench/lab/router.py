"""The server for a simulated call: `saccade route`'s choice, by its own function.

Owns the stand-in for a request's ranking key; sees digests and the number of calls at each server,
never the caches.
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
