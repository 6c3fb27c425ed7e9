"""The tiers of KV pages behind what a scheduler and its prefix cache know of them."""

from __future__ import annotations

from saccade.plugins.tiers.kept_pages import OffloadedPages
from saccade.plugins.tiers.page_arrivals import PageArrivals
from saccade.sched.scheduler import GenerationScheduler


def arrivals_of(scheduler: GenerationScheduler) -> PageArrivals:
    """Return the loads of a scheduler with tiers of KV pages."""
    assert isinstance(scheduler.loads, PageArrivals)
    return scheduler.loads


def kept_of(scheduler: GenerationScheduler) -> OffloadedPages:
    """Return the book of these tiers."""
    return arrivals_of(scheduler).kept
