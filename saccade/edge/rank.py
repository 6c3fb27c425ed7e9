"""The replica for a request: a pure function, so that every router, the Ray deployment and the
simulator agree without communication.

This is rendezvous hashing (Thaler and Ravishankar 1998): each replica has a score for each key and
the highest wins. So a replica that joins or leaves only moves its own keys. Loads are bounded as
in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

ABOVE_MEAN = 1.25
"""A replica may have so many times the mean number of requests."""
SLACK = 8
"""So many requests of one replica are no queue, whatever the others have: they are computed side by
side, and moving one would cost an image's encoding and the prefix of a chat.
"""


def rank(
    keys: Sequence[bytes],
    replicas: Sequence[str],
    load: Mapping[str, int],
    slack: int = SLACK,
) -> list[str]:
    """Order `replicas` as a request should try them.

    keys: the request's images or texts, the oldest first. The oldest decides, because a chat keeps
    it. Without keys, the least loaded replica is first. replicas: names, spelled alike by all
    routers. load: each replica's requests, waiting requests included; 0 if missing. Replicas with
    more than `most` are last.
    """
    bound = most([load.get(name, 0) for name in replicas], slack)

    def order(name: str) -> tuple[bool, int, int, str]:
        here = load.get(name, 0)
        full = here + 1 > bound
        return full, here if full or not keys else 0, -score(keys[0], name) if keys else 0, name

    return sorted(replicas, key=order)


def most(loads: Sequence[int], slack: int = SLACK) -> int:
    """Return the most requests that a replica may have to get the new one, which counts too."""
    if not loads:
        return slack
    return max(slack, math.ceil(ABOVE_MEAN * (sum(loads) + 1) / len(loads)))


def score(key: bytes, replica: str) -> int:
    """Return 64 bits that depend on these two alone."""
    named = len(key).to_bytes(4, "little") + key + replica.encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little")
