"""Chooses the replica for a request with a pure function, so that all routers, the Ray deployment
and the simulator choose the same one without communication.

This is rendezvous hashing (Thaler and Ravishankar 1998): each replica has a score for each key, and
the highest score wins. If a replica is added or removed, only its own keys move. Loads are bounded
as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

ABOVE_MEAN = 1.25
"""Maximum number of requests on a replica, relative to the mean over all replicas."""
SLACK = 8
"""A replica with at most this many requests is never full, because it computes them concurrently.
If a request moved to another replica, that one would encode its image and compute its chat's prefix
again.
"""


def rank(
    keys: Sequence[bytes],
    replicas: Sequence[str],
    load: Mapping[str, int],
    slack: int = SLACK,
) -> list[str]:
    """Return `replicas` in the order in which a router should try them for a request.

    keys: the request's images or texts, oldest first. The oldest decides, because later requests of
        a chat also contain it. Without keys, the least loaded replica is first.
    replicas: names, which all routers must spell in the same way.
    load: the number of requests on each replica, including queued ones; 0 if missing. Replicas at
        the limit that `most` computes are last.
    """
    bound = most([load.get(name, 0) for name in replicas], slack)

    def order(name: str) -> tuple[bool, int, int, str]:
        here = load.get(name, 0)
        full = here + 1 > bound
        return full, here if full or not keys else 0, -score(keys[0], name) if keys else 0, name

    return sorted(replicas, key=order)


def most(loads: Sequence[int], slack: int = SLACK) -> int:
    """Return the maximum number of requests on a replica, including the new one. loads: the
    requests on each replica.
    """
    if not loads:
        return slack
    return max(slack, math.ceil(ABOVE_MEAN * (sum(loads) + 1) / len(loads)))


def score(key: bytes, replica: str) -> int:
    """Return a 64-bit hash of `key` and `replica`."""
    named = len(key).to_bytes(4, "little") + key + replica.encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little")
