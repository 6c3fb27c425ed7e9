"""Other ways to choose which embedding goes first, to compare with what `cache/embeddings.py` does.

Each is a worth: an item's priority is the shelf's floor when it was last used plus this worth, and
whatever goes lifts the floor to its own priority. A worth that is always 0 leaves the order of use:
exactly LRU. Owns no cache code.
"""

from __future__ import annotations

from saccade.cache.embeddings import Worth, encode_cost, saved_encoding
from saccade_bench.lab.options import Policy


def gdsf(num_tokens: int, _popularity: float, uses: int) -> float:
    """GreedyDual-Size with frequency, as published: every use since it came counts, and none from
    before it last went.
    """
    return max(1, uses) * encode_cost(num_tokens) / num_tokens


def gds(num_tokens: int, _popularity: float, _uses: int) -> float:
    """GreedyDual-Size: cost per byte, however often it was used."""
    return encode_cost(num_tokens) / num_tokens


def lru(_num_tokens: int, _popularity: float, _uses: int) -> float:
    """The least recently used goes first."""
    return 0.0


def lfu(_num_tokens: int, _popularity: float, uses: int) -> float:
    """The least often used goes first, with aging (LFU-DA)."""
    return float(max(1, uses))


def size(num_tokens: int, _popularity: float, uses: int) -> float:
    """Uses per byte: as many hits as possible, whatever they save (GDSF with equal costs)."""
    return max(1, uses) / num_tokens


POLICIES: dict[Policy, Worth] = {
    "saccade": saved_encoding,
    "gdsf": gdsf,
    "gds": gds,
    "lru": lru,
    "lfu": lfu,
    "size": size,
}
