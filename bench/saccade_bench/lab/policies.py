"""Other eviction orders for embeddings, to compare with `cache/embeddings.py`.

Each is a worth: an item's priority is the tier's floor at its last use plus this worth, and an
evicted item lifts the floor to its own priority. A constant worth of 0 leaves the order of use:
exactly LRU. Owns no cache code.
"""

from __future__ import annotations

from saccade.cache.embeddings import Worth, encode_cost, saved_encoding
from saccade_bench.lab.options import Policy


def gdsf(num_tokens: int, _popularity: float, uses: int) -> float:
    """GreedyDual-Size with frequency, as published: every use since the item came counts, and none
    from before its last eviction.
    """
    return max(1, uses) * encode_cost(num_tokens) / num_tokens


def gds(num_tokens: int, _popularity: float, _uses: int) -> float:
    """GreedyDual-Size: cost per byte, regardless of the number of uses."""
    return encode_cost(num_tokens) / num_tokens


def lru(_num_tokens: int, _popularity: float, _uses: int) -> float:
    """The least recently used goes first."""
    return 0.0


def lfu(_num_tokens: int, _popularity: float, uses: int) -> float:
    """The least often used goes first, with aging (LFU-DA)."""
    return float(max(1, uses))


def size(num_tokens: int, _popularity: float, uses: int) -> float:
    """Uses per byte: as many hits as possible, whatever their saving (GDSF with equal costs)."""
    return max(1, uses) / num_tokens


POLICIES: dict[Policy, Worth] = {
    "saccade": saved_encoding,
    "gdsf": gdsf,
    "gds": gds,
    "lru": lru,
    "lfu": lfu,
    "size": size,
}
