"""Runs the engine process, after `engine/main.py` has started it and its workers.

It derives the options that are not set once the workers have reported the hardware, then runs the
engine loop. If that fails, it sends the reason to the front end. It has no tensors and does not
import torch.
"""

from __future__ import annotations

import asyncio
import mmap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from saccade import __version__
from saccade.cache.content import PageIdentity
from saccade.core.arena import Arena
from saccade.core.config import EngineConfig, Hardware
from saccade.core.errors import StartupError
from saccade.core.family import FamilySpec, KVSpec
from saccade.core.given_paths import readable, sendable
from saccade.core.metrics import Metrics
from saccade.core.options import usable_cores
from saccade.core.settings import DraftSettings
from saccade.core.types import Tower
from saccade.engine.engine import Engine, EnginePart
from saccade.engine.language import GrammarRequests, LanguageHalf
from saccade.engine.memory_watch import MemoryWatch
from saccade.engine.ranks import pick_device, resolve_parallel, share_hardware
from saccade.engine.schedulers import build_scheduler
from saccade.engine.sizing import (
    MAX_DRAFT_TOKENS,
    check_tower_attention,
    pick_dtype,
    resolve,
    resolve_tower,
    uses_graphs,
)
from saccade.engine.startup_report import LoadInfo, describe
from saccade.engine.workers import Workers, WorkersLost
from saccade.families.checkpoint import digest_weights
from saccade.families.registry import load_spec
from saccade.ipc.child import AsyncChannel, Child, Disconnected, ParentLink
from saccade.ipc.memory import MachineMemory, settle
from saccade.ipc.messages import (
    ENGINE_END,
    Failed,
    Load,
    Loaded,
    Loading,
    Ready,
    ServeModel,
    Started,
    ToEngine,
    ToFront,
)
from saccade.plugins import builder, plugins

if TYPE_CHECKING:
    from saccade.engine.store_lookup import StoreProbe
    from saccade.sched.protocol import Scheduler

PINNED_SHARE = 0.5
"""Maximum fraction that clients may pin of the KV cache, of each of its other tiers, and of the
device's embedding cache.
"""
PLAN_STEPS = 8
"""Maximum steps in a plan whose rows all decode. Such a plan is made and sent only once for all of
its steps.
"""
FLUSH_SECONDS = 2.0
"""Time for the front end to read the last messages before the engine exits."""


async def run(arena_fd: int, parent: ParentLink, begun: Sequence[Child]) -> int:
    """Run the engine with workers that have been started, and return the exit status.

    If it fails, send the reason to the front end.
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
    """Load the model on all ranks, report the derived options to the front end, and run the loop
    until it is stopped.

    Raises StartupError or WorkersLost.
    """
    with readable(boot.folder):
        spec = load_spec(Path(boot.folder), boot.model.family_option, checked=True)
    front.send(Loading("starting PyTorch"))
    load = plan_load(boot, spec, await workers.find_devices())
    loaded, weights = await load_model(boot, workers, load)
    hardware = share_hardware([each.hardware for each in loaded])
    config = decide(boot, spec, load, loaded[0], hardware, weights)
    begun = await workers.allocate(config)
    drafts, no_drafts_reason = draft_tokens(
        boot.settings.drafts, config, spec, batch_invariant=begun.batch_invariant
    )
    config = config if drafts else replace(config, snapshots=config.snapshots.without_drafts)
    wake = partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)
    grammars = partial(open_grammars, spec, wake)
    scheduler, language = build_halves(boot, config, spec, begun, drafts, workers, grammars)
    parts = build_parts(boot, config, scheduler)
    engine = Engine(
        scheduler,
        workers,
        front,
        arrived,
        metrics,
        language,
        probe=open_probe(begun.store, arrived),
        memory=watch_memory(config, load, spec, scheduler, arena_fd, metrics),
        parts=parts,
        deferred=config.graphs.defer or config.encoder.defer_graphs,
    )
    facts = LoadInfo(
        load.family_option,
        loaded[0].quantised,
        len(begun.saved),
        drafts,
        no_drafts_reason,
        begun.prepared,
        boot.arena_bytes,
    )
    decided = describe(config, load.parallel, spec, hardware, facts)
    decided += tuple(line for part in parts for line in part.decided)
    settle()
    served = Tower(begun.tower, config.dtype, spec.embedding_width)
    front.send(Ready(config.kv_tokens, config.context_length, decided, served))
    await engine.run()
    for part in parts:
        part.close()
    await workers.close()


async def load_model(
    boot: ServeModel, workers: Workers, load: Load
) -> tuple[Sequence[Loaded], str]:
    """Load the model on all ranks.

    Returns each rank's response, and a digest of the weights. The digest is "" unless KV pages are
    stored on disk.
    """
    loading = asyncio.create_task(workers.load(load))
    keeps = boot.settings.tiers.kv_disk is not None and load.format != "dummy"
    reading = asyncio.to_thread(digest_weights, Path(boot.folder)) if keeps else None
    with readable(boot.folder):
        weights = await reading if reading else ""
    return await loading, weights


def decide(
    boot: ServeModel,
    spec: FamilySpec,
    load: Load,
    loaded: Loaded,
    hardware: Hardware,
    weights: str,
) -> EngineConfig:
    """Return the engine's configuration. Options that are not set are derived.

    Raises ConfigError.

    loaded: the response of the first rank.
    weights: the digest that `load_model` returned.
    """
    dials = boot.model, boot.engine, spec, load.dtype, hardware
    if boot.role == "encode":
        config = resolve_tower(*dials, boot.caches, boot.settings)
    else:
        config = resolve(*dials, load.parallel.size, boot.caches, boot.settings)
    tower = replace(
        config.encoder,
        role=boot.role,
        quantization=load.quantization_tower,
        defer_graphs=bool(config.encoder.graph_sizes),
    )
    graphs = replace(config.graphs, defer=bool(config.graphs.mixed_tokens))
    kv = replace(config.kv, scales=loaded.kv_scales, attention=loaded.attention)
    config = replace(config, encoder=tower, graphs=graphs, kv=kv)
    pages = replace(kv.pages, identity=identify(config, load, spec, weights).digest())
    return replace(config, kv=replace(kv, pages=pages))


def build_halves(
    boot: ServeModel,
    config: EngineConfig,
    spec: FamilySpec,
    begun: Started,
    drafts: int,
    workers: Workers,
    grammars: Callable[[str], GrammarRequests],
) -> tuple[Scheduler, LanguageHalf | None]:
    """Return the scheduler, and the part of the engine that needs a language model, or None.

    If the server has no language model, a plugin provides the scheduler.
    """
    if build := builder(lambda plugin: plugin.scheduling.scheduler, config):
        scheduler: Scheduler = build(config, spec, begun.saved, boot.arena_bytes)
        return scheduler, None
    # Several ranks would have to agree on the step at which a plan is cancelled. On a GPU, steps
    # are started asynchronously.
    alone = config.device == "cpu" and workers.size == 1
    generation = build_scheduler(
        config,
        spec,
        begun.saved,
        boot.arena_bytes,
        PINNED_SHARE,
        begun.pages,
        drafts,
        batch_invariant=begun.batch_invariant,
        plan_steps=PLAN_STEPS if alone else 1,
    )
    return generation, LanguageHalf(generation, grammars)


def open_grammars(
    spec: FamilySpec, wake: Callable[[], object], tokenizer_json: str
) -> GrammarRequests:
    """Start to load the tokenizer for grammars, in threads of the plugin that implements them.

    Returns the queue of requests that wait for a grammar.

    wake: called when a grammar or a mask is ready.
    """
    build = builder(lambda plugin: plugin.requests.grammars)
    assert build is not None, "the front end rejects such requests otherwise"
    grammars: GrammarRequests = build(tokenizer_json, spec.vocab_size, spec.eos_token_ids, wake)
    return grammars


def build_parts(
    boot: ServeModel, config: EngineConfig, scheduler: Scheduler
) -> tuple[EnginePart, ...]:
    """Create the engine parts of the plugins for which the front end has sent options.

    Raises StartupError.
    """
    named = {each.name: part for each in plugins() if (part := each.scheduling.engine_part)}
    return tuple(
        resolve_name(named[name])(options, config, scheduler)
        for name, options in boot.plugins.items()
    )


def open_probe(store: str, arrived: asyncio.Event) -> StoreProbe | None:
    """Return a `StoreProbe` if a directory is shared with other servers, else None."""
    if not store:
        return None
    from saccade.engine.store_lookup import StoreProbe

    return StoreProbe(store, arrived.set)


def watch_memory(
    config: EngineConfig,
    load: Load,
    spec: FamilySpec,
    scheduler: Scheduler,
    arena_fd: int,
    metrics: Metrics,
) -> MemoryWatch | None:
    """Return a `MemoryWatch` for the memory of this machine, or None on a GPU."""
    if config.device != "cpu":
        return None
    size = load.parallel.size
    page_bytes = returnable_page_bytes(config, spec.kv_spec(size), size)
    return MemoryWatch(MachineMemory(), scheduler, Arena.attach(arena_fd), page_bytes, metrics)


def plan_load(boot: ServeModel, spec: FamilySpec, devices: int) -> Load:
    """Return the `Load` message for every rank. Raises ConfigError.

    devices: the number of CUDA devices that the workers see.
    """
    sharing = boot.settings.parallel
    device = pick_device(boot.model.device, devices, sharing.ranks)
    parallel = resolve_parallel(sharing, spec, device)
    cuda, bits = boot.settings.cuda, boot.settings.quantization
    check_tower_attention(cuda.mm_attention_backend, device)
    return Load(
        folder=boot.folder,
        device=device,
        dtype=pick_dtype(boot.model.dtype, spec.dtype),
        format=boot.model.load_format,
        threads=max(1, (boot.engine.threads or usable_cores()) // parallel.ranks),
        parallel=parallel,
        family_option=boot.model.family_option,
        quantization=bits.quantization,
        quantization_tower=bits.quantization_tower,
        kv_dtype=bits.kv_cache_dtype,
        role=boot.role,
        attention=boot.engine.attention_backend,
        graphs=device == "cuda" and uses_graphs(cuda, spec),
    )


def returnable_page_bytes(config: EngineConfig, kept: KVSpec, ranks: int) -> int:
    """Return how many bytes the operating system gets back per free KV page, on all ranks together.

    Returns 0 if the parts of a KV page are smaller than a memory page, because only whole memory
    pages can be returned.
    """
    kept = kept.with_dtype(config.kv.dtype)
    parts = sum(cache.per == "token" for layer in kept.layers for cache in layer)
    nbytes = config.page_size * kept.token_bytes(config.dtype)
    return nbytes * ranks if nbytes >= parts * mmap.PAGESIZE else 0


def identify(config: EngineConfig, load: Load, spec: FamilySpec, weights: str) -> PageIdentity:
    """Return the identity of the KV pages that this server computes.

    weights: a digest of the checkpoint's files.
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


def draft_tokens(
    settings: DraftSettings, config: EngineConfig, spec: FamilySpec, *, batch_invariant: bool
) -> tuple[int, str]:
    """Return the maximum number of draft tokens (`DraftLimits.tokens`), and the reason to print if
    it is 0.

    It is 0 if drafting is disabled or could change the output. A recurrent state that has processed
    a rejected draft token cannot be undone, so drafting needs memory for the state before each
    draft token.
    """
    why = ""
    if settings.speculative == "off":
        why = "--speculative off"
    elif settings.speculative == "auto" and not batch_invariant:
        why = "results are not batch-invariant, so a draft could change an answer"
    elif spec.kv_spec().state_bytes(config.dtype) and not config.snapshots.between:
        why = "no memory for states of draft tokens"
        if config.device == "cuda":
            why = "states of draft tokens are only supported on CPUs"
        elif settings.speculative == "auto":
            why = "for models with recurrent states, use --speculative always"
    return (0, why) if why else (MAX_DRAFT_TOKENS, "")
