"""Creates the page pool, the caches and the scheduler from the engine's config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.pins import PinTable
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.config import EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.types import ImageKey
from saccade.engine.memory_estimate import embedding_bytes_per_token
from saccade.engine.sizing import prompt_sizes, tower_budget
from saccade.plugins import builder
from saccade.sched.limits import DraftLimits, SchedulerLimits
from saccade.sched.scheduler import GenerationScheduler

if TYPE_CHECKING:
    from saccade.sched.images.tiles import TileIndex
    from saccade.sched.step_pace import StepPace


def build_scheduler(
    config: EngineConfig,
    spec: FamilySpec,
    saved: Iterable[tuple[ImageKey, int]] = (),
    arena_bytes: int = 1 << 40,
    pinned_share: float = 0.0,
    pages: Iterable[tuple[bytes, int]] = (),
    drafts: int = 0,
    *,
    batch_invariant: bool = False,
    paced: bool = True,
    plan_steps: int = 1,
) -> GenerationScheduler:
    """Create a scheduler, with its page pool and caches.

    saved: (key, number of tokens) of each embedding on disk, from `Workers.allocate`.
    pages: (hash, number of bytes) of each KV page on disk.
    pinned_share: see `process.PINNED_SHARE`.
    drafts: see `DraftLimits.tokens`.
    batch_invariant, plan_steps: as in `SchedulerLimits`.
    paced: True to adapt the images and prompts per step to measured times, on an accelerator.
    """
    pool = PagePool(config.kv_pages, config.page_size)
    limits = limits_of(config, spec, arena_bytes)
    drafting = replace(limits.drafts, tokens=drafts)
    limits = replace(
        limits, drafts=drafting, batch_invariant=batch_invariant, plan_steps=plan_steps
    )
    embeddings = build_embeddings(config, spec, saved, pinned_share)
    pins: PinTable[Node] = PinTable(int(pinned_share * pool.capacity))
    snapshots, kept = None, None
    if build := builder(lambda plugin: plugin.caches.snapshots, config, spec):
        snapshots = build(config, spec)
    tiles, prefix = build_tiles(spec, embeddings), None
    if config.prefix_cache and (snapshots is not None or not keeps_states(config, spec)):
        if build := builder(lambda plugin: plugin.caches.page_tiers, config):
            kept = build(config, spec, pages, pinned_share)
        # After a restart, files can be found only by the keys of images, because the hashes of
        # tiles are lost.
        on_disk = kept is not None and "disk" in kept.tiers
        by_tiles = None if tiles is None or on_disk or sees_whole(spec) else tiles.by_tiles
        prefix = PrefixCache(pool, pins, snapshots, kept, by_tiles)
    pace = build_pace(config, spec) if paced and not limits.tower_shares else None
    return GenerationScheduler(limits, pool, prefix, embeddings, spec.eos_token_ids, pace, tiles)


def build_pace(config: EngineConfig, spec: FamilySpec) -> StepPace:
    """Return the object that adapts the work per step to measured times."""
    from saccade.sched.step_pace import PromptPace, StepPace  # on a GPU only

    sizes, prompts = prompt_sizes(config.chunk_tokens), None
    if config.prompt_pause:
        prompts = PromptPace(sizes, config.prompt_pause)
    return StepPace(config.tower_budget, tower_budget(spec, 1), prompts)


def keeps_states(config: EngineConfig, spec: FamilySpec) -> bool:
    """Return True for a model with a recurrent state per sequence."""
    return spec.kv_spec().state_bytes(config.dtype) > 0


def sees_whole(spec: FamilySpec) -> bool:
    """Return True if the KV of an image token depends on more than the tokens before it."""
    return spec.position_axes > 1 or spec.kv_spec().whole_images


def build_tiles(spec: FamilySpec, embeddings: EmbeddingCache) -> TileIndex | None:
    """Return an index of tiles, or None if the vision encoder does not encode tiles
    independently.
    """
    if spec.tiles is None:
        return None
    from saccade.sched.images.tiles import TileIndex

    return TileIndex(spec.tiles, spec.num_patches, embeddings)


def limits_of(config: EngineConfig, spec: FamilySpec, arena_bytes: int) -> SchedulerLimits:
    """Return the limits for the scheduler from the engine's config."""
    given = (
        embedding_bytes_per_token(spec, config.dtype) if config.encoder.role == "language" else 0
    )
    first = config.max_running + config.snapshots.count
    kept, lines = spec.kv_spec(), range(first, first + config.snapshots.between)
    states = lines if kept.state_bytes(config.dtype) else None
    return SchedulerLimits(
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        context_length=config.context_length,
        encode_patches=config.encode_patches,
        chunk_aware=config.chunk_aware,
        arena_bytes=arena_bytes,
        tower_budget=config.tower_budget,
        tower_shares=config.device == "cpu",
        tower_blocks=spec.encoder_blocks,
        snapshot_tokens=config.snapshots.tokens,
        given_bytes=given,
        drafts=DraftLimits(states=states, head=kept.drafts),
        whole_image_tokens=spec.largest_image.tokens if kept.whole_images else 0,
    )


def build_embeddings(
    config: EngineConfig,
    spec: FamilySpec,
    saved: Iterable[tuple[ImageKey, int]],
    pinned_share: float = 0.0,
) -> EmbeddingCache:
    """Create the embedding cache.

    saved: (key, number of tokens) of each embedding on disk.
    """
    pins: PinTable[ImageKey] = PinTable(int(pinned_share * config.embeddings.device_bytes))
    row = embedding_bytes_per_token(spec, config.dtype)
    return EmbeddingCache(config.embeddings, row, saved, pins=pins)
