"""Slower cache tiers for KV pages and image embeddings: host memory, disk, and a store on disk that
several servers share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Caches, Offer, Plugin

if TYPE_CHECKING:
    import torch

    from saccade.core.config import EmbeddingBudgets, EngineConfig
    from saccade.sched.parts.step_part import PartContext

PLUGIN = Plugin(
    "tiers",
    options="saccade.plugins.tiers.options:TierOptions",
    caches=Caches(
        page_tiers=Offer(
            "saccade.plugins.tiers.kept_pages:build_kept", "saccade.plugins.tiers:keeps_pages"
        ),
        page_loads=Offer(
            "saccade.plugins.tiers.page_arrivals:PageArrivals", "saccade.plugins.tiers:has_tiers"
        ),
        page_memory=Offer(
            "saccade.plugins.tiers.page_memory:PageTierMemory", "saccade.plugins.tiers:keeps_pages"
        ),
        embedding_tiers=Offer(
            "saccade.plugins.tiers.embedding_tiers:open_tiers",
            "saccade.plugins.tiers:keeps_embeddings",
        ),
    ),
)


def keeps_pages(config: EngineConfig) -> bool:
    return bool(config.kv.pages)


def keeps_embeddings(budgets: EmbeddingBudgets, like: torch.Tensor) -> bool:
    """Return True if evicted embeddings move to another tier.

    like: a tensor on the model's device. For a model on a CPU, host memory is not a separate tier.
    """
    return budgets.folder is not None or (like.is_cuda and budgets.host_bytes > 0)


def has_tiers(context: PartContext) -> bool:
    return context.prefix is not None and context.prefix.kept is not None
