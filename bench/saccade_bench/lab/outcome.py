"""The findings of a simulation: counts, exact for its trace, and estimated times.

Owns the shapes. Knows nothing of their making.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from saccade.cache.embeddings import EmbeddingCache
from saccade_bench.lab.options import Routing
from saccade_bench.load.measure import Distribution


@dataclass(slots=True)
class StepCounts:
    """Counts over all replicas. `images_kv`, `images_embedding`: images found at that level;
    `pixels_reused`: encoded again, but not decoded.

    `moved` is in bytes, by way: "device to host", "pixels to engine" and so on.
    """

    # requests and their tokens
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # images by where they were found
    images: int = 0
    images_kv: int = 0
    images_embedding: int = 0
    images_encoded: int = 0
    images_decoded: int = 0
    pixels_reused: int = 0
    patches_encoded: int = 0
    # pages and sequences
    pages_evicted: int = 0
    preemptions: int = 0
    moved: dict[str, int] = field(default_factory=dict)

    def add(self, other: StepCounts) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                setattr(self, name, dict(Counter(mine) + Counter(theirs)))
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of embeddings in one tier, over all replicas."""

    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class PagesTier:
    """Counts of KV pages in one tier, over all replicas. `slow`: computed, for reading took, or
    would have taken, longer. `restored`: prompt tokens back from the tier.
    """

    restored: int
    saved: int
    read: int
    slow: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Served:
    """One call's end. Times in ms; `tpot` is None for answers of one token."""

    session: int
    round: int
    replica: int
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    tpot: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trace on one arrangement of replicas. `duration` is in ms, `busy` the share of it in
    which each replica computed.

    `different`: distinct images among the sent ones.
    """

    # what was simulated
    routing: Routing | None
    # times
    duration: float
    busy: tuple[float, ...]
    ttft: Distribution
    # counts
    counts: StepCounts
    tiers: dict[str, TierCounts]
    page_tiers: dict[str, PagesTier]
    different: int
    served: tuple[Served, ...] = ()

    @property
    def encodes(self) -> float:
        """Per different image."""
        return self.counts.images_encoded / max(1, self.different)

    @property
    def kv_rate(self) -> float:
        return self.counts.cached_tokens / max(1, self.counts.prompt_tokens)


def tiers(caches: Iterable[EmbeddingCache]) -> dict[str, TierCounts]:
    """The sum of all caches' counts, by tier."""
    sums: dict[str, TierCounts] = {}
    for cache in caches:
        for tier, shelf in cache.tiers.items():
            old = sums.get(tier, TierCounts(0, 0, 0))
            sums[tier] = TierCounts(
                old.hits + cache.hits[tier],
                old.misses + cache.misses[tier],
                old.evictions + shelf.evictions,
            )
    return sums
