"""The parts that a scheduler has, by its limits and its caches: each is built once, or absent."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.sched.limits import SchedulerLimits
from saccade.sched.parts.cache_control import CacheControlTracker
from saccade.sched.parts.page_arrivals import PageArrivals
from saccade.sched.parts.snapshot_scheduler import SnapshotScheduler
from saccade.sched.parts.speculative import SpeculativeDecoding
from saccade.sched.parts.step_part import StepPart


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a scheduler.

    every: parts in each sequence's steps. asked: the same, and the part for sequences that ask
    something from the caches. arrivals, snapshots: for the KV cache.
    """

    every: tuple[StepPart, ...]
    asked: tuple[StepPart, ...]
    arrivals: PageArrivals | None = None
    snapshots: SnapshotScheduler | None = None


def build_parts(
    limits: SchedulerLimits,
    pool: PagePool,
    prefix: PrefixCache | None,
    embeddings: EmbeddingCache,
    token_limit: int,
) -> Parts:
    """Build the parts that have something to do.

    Draft tokens come before snapshots, which look at the draft tokens' rows.
    """
    arrivals, snapshots, every = None, None, list[StepPart]()
    if prefix is not None and prefix.kept is not None:
        arrivals = PageArrivals(pool, prefix, prefix.kept)
    if prefix is not None and prefix.snapshots is not None:
        snapshots = SnapshotScheduler(prefix, pool.page_size, limits.snapshot_tokens)
    if limits.drafts.tokens:
        every.append(SpeculativeDecoding(limits, pool, token_limit, snapshots))
    if snapshots is not None:
        every.append(snapshots)
    control = CacheControlTracker(prefix, embeddings, pool.page_size, arrivals)
    return Parts((*every,), (*every, control), arrivals, snapshots)
