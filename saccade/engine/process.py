"""The engine process: `python -m saccade.engine.process`, started by `engine/link.py` with a `Boot`
on standard input.

Loads the model, decides what was left open, then runs the engine loop. Tells the front why when it
cannot.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig, Hardware
from saccade.core.errors import ConfigError, StartupError
from saccade.core.family import FamilySpec
from saccade.core.messages import Failed, Ready
from saccade.core.metrics import Metrics
from saccade.core.options import ModelOptions, usable_cores
from saccade.core.types import ImageKey
from saccade.engine.engine import Engine
from saccade.engine.link import Boot, EngineLink
from saccade.engine.ranks import Ranks
from saccade.engine.sizing import (
    count_saved,
    describe,
    embedding_bytes_per_token,
    resolve,
    resolve_parallel,
)
from saccade.families.checkpoint import read_checkpoint
from saccade.families.registry import load_spec
from saccade.parallel import meeting_place
from saccade.runtime.rank import (
    Load,
    die_with_parent,
    leave_signals_to_front,
    load,
    measure_hardware,
)
from saccade.runtime.worker import Worker
from saccade.sched.limits import SchedulerLimits
from saccade.sched.scheduler import Scheduler


def main() -> int:
    """Exit status 0 after an orderly stop, 1 otherwise."""
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Boot)
    die_with_parent(boot.parent)
    leave_signals_to_front()
    link = EngineLink(boot.address)
    try:
        serve(boot, link)
    except StartupError as error:
        link.send(Failed(str(error)))
        return 1
    except Exception as error:
        traceback.print_exc()
        link.send(Failed(f"the engine failed: {type(error).__name__}: {error}"))
        return 1
    finally:
        link.close()
    return 0


def serve(boot: Boot, link: EngineLink) -> None:
    """Load the model, on all ranks; tell the front what was decided; run until told to stop."""
    spec = load_spec(Path(boot.folder))
    wanted = plan_load(boot, spec)
    size = wanted.parallel.size
    arena = Arena.attach(boot.arena_fd, boot.arena_bytes)
    ranks = Ranks(wanted, arena, lambda why: give_up(boot.words_fd, why)) if size > 1 else None
    net, shard = load(wanted)
    hardware = share_hardware(wanted, ranks.wait_loaded() if ranks else [])
    config = resolve(boot.model, boot.engine, spec, wanted.dtype, hardware, size)
    metrics = Metrics()
    if ranks:
        ranks.begin(config)
    worker = Worker(net, config, arena, shard, wanted.parallel.encoder, metrics)
    if ranks:
        ranks.follow(worker)
    saved_bytes = sum(tokens for _, tokens in worker.saved) * embedding_bytes_per_token(
        spec, config.dtype
    )
    config = count_saved(config, boot.engine, saved_bytes)
    engine = Engine(
        build_scheduler(config, spec, worker.saved, boot.arena_bytes),
        ranks or worker,
        link,
        metrics,
    )
    decided = describe(
        config, wanted.parallel, spec, hardware, wanted.patch_embed, len(worker.saved)
    )
    link.send(Ready(config.kv_tokens, config.context_length, decided))
    engine.run()
    worker.close()
    if ranks:
        ranks.close()


def plan_load(boot: Boot, spec: FamilySpec) -> Load:
    """What rank 0 is to load, as the other ranks are but for their number. Raises ConfigError."""
    device = pick_device(boot.model, boot.parallel.tp_size)
    parallel = resolve_parallel(boot.parallel, spec, device)
    return Load(
        rank=0,
        folder=boot.folder,
        device=device,
        dtype=pick_dtype(boot.model, Path(boot.folder)),
        format=boot.model.load_format,
        threads=max(1, (boot.engine.threads or usable_cores()) // parallel.size),
        parallel=parallel,
        group_fd=meeting_place(),
        patch_embed=boot.model.patch_embed,
    )


def share_hardware(wanted: Load, others: list[Hardware]) -> Hardware:
    """What each rank may use: its own device, as the fullest of them is, or its part of the
    machine.
    """
    mine = measure_hardware(wanted.device)
    ranks = 1 + len(others)
    if wanted.device == "cuda":
        free = min(each.free_bytes for each in (mine, *others))
        return replace(mine, free_bytes=free, host_free_bytes=mine.host_free_bytes // ranks)
    return replace(mine, total_bytes=mine.total_bytes // ranks, free_bytes=mine.free_bytes // ranks)


def give_up(words_fd: int, why: str) -> None:
    """End this process, whatever its main thread hangs in; the front reads why from the pipe."""
    os.write(words_fd, why.encode())
    os._exit(1)


def build_scheduler(
    config: EngineConfig,
    spec: FamilySpec,
    saved: Iterable[tuple[ImageKey, int]] = (),
    arena_bytes: int = 1 << 40,
) -> Scheduler:
    """The deciding half of the engine: page pool, caches, scheduler.

    `saved`: embeddings on disk (`Worker.saved`).
    """
    pool = PagePool(config.kv_pages, config.page_size)
    limits = SchedulerLimits(
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        context_length=config.context_length,
        encode_patches=config.encode_patches,
        arena_bytes=arena_bytes,
        patch_size=spec.image_rules.patch,
        tower_budget=config.tower_budget,
        tower_blocks=spec.encoder_blocks,
    )
    embeddings = EmbeddingCache(
        config.embeddings, embedding_bytes_per_token(spec, config.dtype), saved
    )
    prefix = PrefixCache(pool) if config.prefix_cache else None
    return Scheduler(limits, pool, prefix, embeddings, spec.eos_token_ids)


def pick_dtype(model: ModelOptions, folder: Path) -> Dtype:
    """The dtype asked for, else the checkpoint's own; bfloat16 where that is none the engine
    computes in.
    """
    wanted = read_checkpoint(folder).dtype() if model.dtype == "auto" else model.dtype
    known: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    return known.get(wanted, "bfloat16")


def pick_device(model: ModelOptions, ranks: int) -> Literal["cpu", "cuda"]:
    """Raises ConfigError when cuda is asked for and there is none, or not one for each rank."""
    if model.device == "cpu":
        return "cpu"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if model.device == "cuda" and not devices:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device; install a CUDA build of torch, or use "
            "--device cpu"
        )
    if 0 < devices < ranks:
        raise ConfigError(
            f"--tp-size {ranks}: torch sees {devices} CUDA devices, and each rank needs one"
        )
    return "cuda" if devices else "cpu"


if __name__ == "__main__":
    sys.exit(main())
