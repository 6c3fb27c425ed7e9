"""Other ways to choose which embedding goes first, to compare with what `cache/embeddings.py` does.

Each is the same cache with another worth: an item's priority is the shelf's floor when it was last
used plus this worth, and whatever goes lifts the floor to its own priority. A worth that is always
0 leaves the order of use: exactly LRU. Owns no cache code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lab.options import Policy
from saccade.cache.embeddings import EmbeddingCache, encode_cost
from saccade.core.config import EmbeddingBudgets
from saccade.core.types import ImageKey


class GDSF(EmbeddingCache):
    """GreedyDual-Size with frequency, as published: every use since it came counts, and none from
    before it last went.
    """

    def __init__(
        self,
        budgets: EmbeddingBudgets,
        bytes_per_token: int,
        on_disk: Iterable[tuple[ImageKey, int]] = (),
    ) -> None:
        self._uses: Counter[ImageKey] = Counter()
        super().__init__(budgets, bytes_per_token, on_disk)

    def pin(self, key: ImageKey) -> None:
        self._uses[key] += 1
        super().pin(key)

    def worth(self, key: ImageKey, /) -> float:
        return max(1, self._uses[key]) * self.cost(self._known[key].num_tokens)

    def cost(self, num_tokens: int, /) -> float:
        """Of having it encoded again, per token."""
        return encode_cost(num_tokens) / num_tokens

    def _forget(self, key: ImageKey) -> int:
        num_tokens = super()._forget(key)
        if self.locate(key) is None:
            self._uses.pop(key, None)
        return num_tokens


class LFU(GDSF):
    """The least often used goes first, with aging (LFU-DA)."""

    def cost(self, _num_tokens: int, /) -> float:
        return 1.0


class SizePolicy(GDSF):
    """Uses per byte: as many hits as possible, whatever they save (GDSF with equal costs)."""

    def cost(self, num_tokens: int, /) -> float:
        return 1 / num_tokens


class GDS(EmbeddingCache):
    """GreedyDual-Size: cost per byte, however often it was used."""

    def worth(self, key: ImageKey, /) -> float:
        num_tokens = self._known[key].num_tokens
        return encode_cost(num_tokens) / num_tokens


class LRUPolicy(EmbeddingCache):
    """The least recently used goes first."""

    def worth(self, _key: ImageKey, /) -> float:
        return 0.0


POLICIES: dict[Policy, type[EmbeddingCache]] = {
    "saccade": EmbeddingCache,
    "gdsf": GDSF,
    "gds": GDS,
    "lru": LRUPolicy,
    "lfu": LFU,
    "size": SizePolicy,
}
