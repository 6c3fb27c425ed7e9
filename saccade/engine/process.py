"""What the engine process does, once `engine/main.py` has begun it and its workers.

Decides open options once the workers have reported the machine, then runs the engine loop. Tells
the front the reason of a failure. Holds no tensors and loads no torch.
"""

from __future__ import annotations

import asyncio
import mmap
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from saccade import __version__
from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.kept_pages import KeptPages
from saccade.cache.pages import PagePool
from saccade.cache.pins import PinBook
from saccade.cache.prefix import Node, PrefixCache
from saccade.cache.snapshots import Snapshots
from saccade.core.arena import Arena
from saccade.core.config import EngineConfig
from saccade.core.errors import StartupError
from saccade.core.family import FamilySpec, KVSpec
from saccade.core.given_paths import readable, sendable
from saccade.core.metrics import Metrics
from saccade.core.options import EngineOptions, usable_cores
from saccade.core.page_store import PageIdentity
from saccade.core.types import ImageKey, Tower
from saccade.engine.claims import embedding_bytes_per_token
from saccade.engine.engine import Engine
from saccade.engine.grammar_loader import GrammarLoader
from saccade.engine.language import LanguageHalf
from saccade.engine.memory_watch import MemoryWatch
from saccade.engine.ranks import pick_device, resolve_parallel, share_hardware
from saccade.engine.sizing import (
    MOST_DRAFT_TOKENS,
    pick_dtype,
    resolve,
    resolve_tower,
    tower_budget,
)
from saccade.engine.startup_report import LoadFacts, describe
from saccade.engine.store_lookup import StoreProbe
from saccade.engine.workers import Workers, WorkersLost
from saccade.families.checkpoint import digest_weights
from saccade.families.registry import load_spec
from saccade.ipc.child import AsyncChannel, Child, Disconnected, ParentLink
from saccade.ipc.machine_memory import MachineMemory
from saccade.ipc.memory import settle
from saccade.ipc.messages import (
    ENGINE_END,
    Failed,
    Load,
    Loading,
    Ready,
    ServeModel,
    ToEngine,
    ToFront,
    TokenizerText,
)
from saccade.sched.encoding import EncodeScheduler
from saccade.sched.images.tiles import TileBook
from saccade.sched.images.tower_pace import TowerPace
from saccade.sched.limits import DraftLimits, SchedulerLimits
from saccade.sched.protocol import Scheduler
from saccade.sched.scheduler import GenerationScheduler

PINNED_SHARE = 0.5
"""Of the KV cache and of each tier of it, and of the device's embedding cache: what requests may
pin.
"""
PLAN_STEPS = 8
"""Steps in a plan where rows only decode: planning and sending is done once for so many tokens."""
FLUSH_SECONDS = 2.0
"""A front that does not read gets so long before the engine goes."""


async def run(arena_fd: int, parent: ParentLink, begun: Sequence[Child]) -> int:
    """Serve with the workers that have begun. On failure, tell the front why.

    Returns the exit status.
    """
    arrived = asyncio.Event()
    front = await AsyncChannel.open(parent.socket, ENGINE_END, arrived)
    metrics = Metrics()
    workers = Workers(begun, arrived, metrics, front.send)
    try:
        await workers.start()
        served = await front.receive()
        assert isinstance(served, ServeModel)
        await serve(served, front, workers, arrived, metrics, arena_fd)
    except Disconnected:
        return 1
    except StartupError as error:
        front.send(Failed(sendable(str(error))))
        return 1
    except WorkersLost as lost:
        front.send(Failed(sendable(str(lost))))
        return 1
    except Exception as error:
        traceback.print_exc()
        front.send(Failed(sendable(f"the engine failed: {type(error).__name__}: {error}")))
        return 1
    finally:
        await workers.kill()
        await front.flush(FLUSH_SECONDS)
    return 0


async def serve(
    boot: ServeModel,
    front: AsyncChannel[ToFront, ToEngine],
    workers: Workers,
    arrived: asyncio.Event,
    metrics: Metrics,
    arena_fd: int,
) -> None:
    """Load the model on all ranks, tell the front what was decided, and run until told to stop.

    Raises StartupError or WorkersLost.
    """
    with readable(boot.folder):
        spec = load_spec(Path(boot.folder), boot.model.family_option)
    words = await front.receive()
    assert isinstance(words, TokenizerText)
    grammar_loader = GrammarLoader(
        partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)
    )
    front.send(Loading("starting PyTorch"))
    # Load the model, and meanwhile the lexicon.
    devices = await workers.find_devices()
    load = plan_load(boot, spec, devices)
    size = load.parallel.size
    loading = asyncio.create_task(workers.load(load))
    keeps = boot.caches.kv_cache_dir is not None and load.format != "dummy"
    reading = asyncio.to_thread(digest_weights, Path(boot.folder)) if keeps else None
    await grammar_loader.read_lexicon(words.tokenizer_json, spec.vocab_size, spec.eos_token_ids)
    with readable(boot.folder):
        weights = await reading if reading else ""
    loaded = await loading
    # Decide what was left open.
    hardware = share_hardware([each.hardware for each in loaded])
    dials = boot.model, boot.engine, spec, load.dtype, hardware
    if boot.role == "encode":
        config = resolve_tower(*dials, boot.caches)
    else:
        config = resolve(*dials, size, boot.caches)
    tower = replace(config.encoder, role=boot.role, quantization=load.quantization_tower)
    kv = replace(config.kv, scales=loaded[0].kv_scales, attention=loaded[0].attention)
    config = replace(config, encoder=tower, kv=kv)
    pages = replace(kv.pages, identity=identify(config, load, spec, weights).digest())
    config = replace(config, kv=replace(kv, pages=pages))
    begun = await workers.allocate(config)
    saved, probe = begun.saved, StoreProbe(begun.store, arrived.set) if begun.store else None
    # Build the deciding half.
    drafts, no_drafts_reason = draft_tokens(
        boot.engine, config, spec, batch_invariant=begun.batch_invariant
    )
    config = config if drafts else replace(config, snapshots=config.snapshots.without_drafts)
    scheduler: Scheduler
    language: LanguageHalf | None = None
    if config.encoder.role == "encode":
        scheduler = build_encode_scheduler(config, spec, saved, boot.arena_bytes)
    else:
        given = saved, boot.arena_bytes, PINNED_SHARE, begun.pages, drafts
        # Several ranks would have to agree on where a halt came. A GPU's steps are begun ahead.
        alone = config.device == "cpu" and workers.size == 1
        scheduler = generation = build_scheduler(
            config,
            spec,
            *given,
            batch_invariant=begun.batch_invariant,
            plan_steps=PLAN_STEPS if alone else 1,
        )
        language = LanguageHalf(generation, grammar_loader)
    memory = None
    if config.device == "cpu":
        page_bytes = returnable_page_bytes(config, spec.kv_spec(size), size)
        arena = Arena.attach(arena_fd)
        memory = MemoryWatch(MachineMemory(), scheduler, arena, page_bytes, metrics)
    engine = Engine(
        scheduler, workers, front, arrived, metrics, language, probe=probe, memory=memory
    )
    facts = LoadFacts(
        load.family_option,
        loaded[0].quantised,
        len(saved),
        drafts,
        no_drafts_reason,
        begun.prepared,
        boot.arena_bytes,
    )
    decided = describe(config, load.parallel, spec, hardware, facts)
    settle()
    served = Tower(begun.tower, config.dtype, spec.embedding_width)
    front.send(Ready(config.kv_tokens, config.context_length, decided, served))
    await engine.run()
    await workers.close()


def plan_load(boot: ServeModel, spec: FamilySpec, devices: int) -> Load:
    """Return the load order for every rank, for workers that see `devices` CUDA devices.

    Raises ConfigError.
    """
    device = pick_device(boot.model.device, devices, boot.parallel.ranks)
    parallel = resolve_parallel(boot.parallel, spec, device)
    return Load(
        folder=boot.folder,
        device=device,
        dtype=pick_dtype(boot.model.dtype, spec.dtype),
        format=boot.model.load_format,
        threads=max(1, (boot.engine.threads or usable_cores()) // parallel.ranks),
        parallel=parallel,
        family_option=boot.model.family_option,
        quantization=boot.model.quantization,
        quantization_tower=boot.model.quantization_tower,
        kv_dtype=boot.model.kv_cache_dtype,
        role=boot.role,
        attention=boot.engine.attention_backend,
        graphs=device == "cuda" and not boot.engine.disable_cuda_graph,
    )


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
    """Build the deciding half of the engine: page pool, caches, scheduler.

    `saved`, `pages`: embeddings, and KV pages, on disk (`Workers.allocate`). `pinned_share`:
    `PINNED_SHARE`. `drafts`: `DraftLimits.tokens`. `batch_invariant`: as
    `SchedulerLimits.batch_invariant`. `paced`: the tower's budget follows pauses, on an
    accelerator. `plan_steps`: as in `SchedulerLimits`.
    """
    pool = PagePool(config.kv_pages, config.page_size)
    limits = limits_of(config, spec, arena_bytes)
    drafting = replace(limits.drafts, tokens=drafts)
    limits = replace(
        limits, drafts=drafting, batch_invariant=batch_invariant, plan_steps=plan_steps
    )
    embeddings = build_embeddings(config, spec, saved, pinned_share)
    pins: PinBook[Node] = PinBook(int(pinned_share * pool.capacity))
    keeps_states = spec.kv_spec().state_bytes(config.dtype) > 0
    snapshots: Snapshots[Node] = Snapshots(config.max_running, config.snapshots.count)
    tiles, prefix = build_tiles(spec, embeddings), None
    if config.prefix_cache and (config.snapshots.count or not keeps_states):
        kept = build_kept(config, spec, pages, pinned_share) if config.kv.pages else None
        by_tiles = None if tiles is None or kept is not None or sees_whole(spec) else tiles.by_tiles
        prefix = PrefixCache(pool, pins, snapshots if keeps_states else None, kept, by_tiles)
    paced = paced and limits.tower_budget > 0 and not limits.tower_shares
    whole = tower_budget(spec, 1) if paced else 0
    pace = TowerPace(limits.tower_budget, whole) if paced else None
    return GenerationScheduler(limits, pool, prefix, embeddings, spec.eos_token_ids, pace, tiles)


def returnable_page_bytes(config: EngineConfig, kept: KVSpec, ranks: int) -> int:
    """Return the bytes that a free KV page gives back to the system, on all ranks.

    0 if a page's parts are smaller than the system's pages, as it takes only whole ones.
    """
    kept = kept.with_dtype(config.kv.dtype)
    parts = sum(cache.per == "token" for layer in kept.layers for cache in layer)
    nbytes = config.page_size * kept.token_bytes(config.dtype)
    return nbytes * ranks if nbytes >= parts * mmap.PAGESIZE else 0


def identify(config: EngineConfig, load: Load, spec: FamilySpec, weights: str) -> PageIdentity:
    """Return the identity of this server's KV pages.

    weights: a digest over the checkpoint's files.
    """
    quantised = load.quantization, load.quantization_tower
    computed = load.device, load.dtype, load.format, *quantised, load.family_option
    size = load.parallel.size
    return PageIdentity(
        weights=weights,
        computed=repr((spec.family, *computed)),
        kept=repr((config.kv.dtype, config.kv.scales)),
        layout=repr((size, load.parallel.ranks, spec.kv_spec(size).with_dtype(config.kv.dtype))),
        page_size=config.page_size,
        release=__version__,
    )


def build_kept(
    config: EngineConfig,
    spec: FamilySpec,
    found: Iterable[tuple[bytes, int]],
    pinned_share: float,
) -> KeptPages:
    """Build the book for KV pages beside the pool."""
    pages = config.kv.pages
    each = spec.kv_spec(pages.ranks).with_dtype(config.kv.dtype)
    page_bytes = config.page_size * each.token_bytes(config.dtype) * pages.ranks
    state_bytes = each.state_bytes(config.dtype) * pages.ranks
    return KeptPages(
        pages.identity,
        page_bytes,
        state_bytes,
        pages.disk_bytes,
        found,
        pages.host_bytes * pages.ranks,
        pinned_share,
    )


def build_encode_scheduler(
    config: EngineConfig,
    spec: FamilySpec,
    saved: Iterable[tuple[ImageKey, int]],
    arena_bytes: int,
) -> EncodeScheduler:
    """Build the deciding half of an engine with a vision tower alone."""
    limits = limits_of(config, spec, arena_bytes)
    embeddings = build_embeddings(config, spec, saved)
    return EncodeScheduler(limits, embeddings, build_tiles(spec, embeddings))


def sees_whole(spec: FamilySpec) -> bool:
    """Return True if an image token's keys and values depend on more than tokens before it."""
    return spec.position_axes > 1 or spec.kv_spec().whole_images


def build_tiles(spec: FamilySpec, embeddings: EmbeddingCache) -> TileBook | None:
    """Build the book of tiles, or None for a tower that sees none apart."""
    return None if spec.tiles is None else TileBook(spec.tiles, spec.num_patches, embeddings)


def draft_tokens(
    options: EngineOptions, config: EngineConfig, spec: FamilySpec, *, batch_invariant: bool
) -> tuple[int, str]:
    """Return `DraftLimits.tokens`, 0 where drafting could change an answer, and the reason for 0.

    The reason is in words. A state that has seen a rejected draft token keeps its trace, so a state
    from before is needed.
    """
    why = ""
    if options.speculative == "off":
        why = "--speculative off"
    elif options.speculative == "auto" and not batch_invariant:
        why = "a row's values depend on the rows beside it, so that a guess could change an answer"
    elif spec.kv_spec().state_bytes(config.dtype) and not config.snapshots.between:
        why = "no memory is left for states between guesses"
        if config.device == "cuda":
            why = "states between guesses are kept on CPUs alone"
        elif options.speculative == "auto":
            why = "a model with a state per sequence is guessed for with --speculative always"
    return (0, why) if why else (MOST_DRAFT_TOKENS, "")


def limits_of(config: EngineConfig, spec: FamilySpec, arena_bytes: int) -> SchedulerLimits:
    """Return the scheduler's bounds."""
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
    """Build the embedding cache, with the `saved` embeddings on disk."""
    pins: PinBook[ImageKey] = PinBook(int(pinned_share * config.embeddings.device_bytes))
    row = embedding_bytes_per_token(spec, config.dtype)
    return EmbeddingCache(config.embeddings, row, saved, pins=pins)
