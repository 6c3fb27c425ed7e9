"""Other ways to choose which embedding goes first, to compare with what `cache/embeddings.py` does.

Each is the same cache with another worth: an item's priority is the shelf's floor when it was last used plus this worth, and whatever
goes lifts the floor to its own priority. A worth that is always 0 leaves the order of use: exactly LRU. Owns no cache code.
"""

from __future__ import annotations

from saccade.cache.embeddings import EmbeddingCache, encode_cost
from saccade.lab.options import Policy


class GDS(EmbeddingCache):
    """GreedyDual-Size: cost per byte, however often it was used."""

    def worth(self, _uses: int, num_tokens: int, /) -> float:
        return encode_cost(num_tokens) / num_tokens


class LRU(EmbeddingCache):
    """The least recently used goes first."""

    def worth(self, _uses: int, _num_tokens: int, /) -> float:
        return 0.0


class LFU(EmbeddingCache):
    """The least often used goes first, with aging (LFU-DA)."""

    def worth(self, uses: int, _num_tokens: int, /) -> float:
        return float(max(uses, 1))


class Size(EmbeddingCache):
    """Uses per byte: as many hits as possible, whatever they save (GDSF with equal costs)."""

    def worth(self, uses: int, num_tokens: int, /) -> float:
        return max(uses, 1) / num_tokens


POLICIES: dict[Policy, type[EmbeddingCache]] = {"gdsf": EmbeddingCache, "gds": GDS, "lru": LRU, "lfu": LFU, "size": Size}
