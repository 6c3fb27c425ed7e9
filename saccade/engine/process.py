"""The engine process: `python -m saccade.engine.process`, started by `engine/link.py` with a `Boot` on standard input.

Loads the model, decides what was left open, then runs the engine loop. Tells the front why when it cannot.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import psutil
import torch

from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.arena import Arena
from saccade.core.config import Dtype, EngineConfig, Hardware, ModelOptions, describe, resolve, usable_cores
from saccade.core.errors import ConfigError, StartupError
from saccade.core.family import FamilySpec
from saccade.core.messages import Failed, Ready
from saccade.core.metrics import Metrics
from saccade.engine.engine import Engine
from saccade.engine.link import Boot, EngineLink
from saccade.families.checkpoint import read_checkpoint
from saccade.families.registry import load_spec
from saccade.runtime.weights import load_net
from saccade.runtime.worker import DTYPES, Worker
from saccade.sched.scheduler import Scheduler, SchedulerLimits

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit status 0 after an orderly stop, 1 otherwise."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Boot)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(boot.address)
    try:
        start(boot, link).run()
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


def start(boot: Boot, link: EngineLink) -> Engine:
    """Load the model and build the engine; tells the front when it is ready."""
    torch.set_num_threads(boot.engine.threads or usable_cores())
    folder = Path(boot.folder)
    spec = load_spec(folder)
    device = pick_device(boot.model)
    dtype = pick_dtype(boot.model, folder)
    net = load_net(spec, folder, dtype=DTYPES[dtype], device=device, load_format=boot.model.load_format)
    hardware = measure_hardware(device)
    config = resolve(boot.model, boot.engine, spec, dtype, hardware)
    worker = Worker(net, config, Arena.attach(boot.arena_fd, boot.arena_bytes))
    engine = Engine(build_scheduler(config, spec), worker, link, Metrics())
    link.send(Ready(config.kv_tokens, config.context_length, describe(config, spec, hardware)))
    return engine


def build_scheduler(config: EngineConfig, spec: FamilySpec) -> Scheduler:
    """The deciding half of the engine: page pool, caches, scheduler."""
    pool = PagePool(config.kv_pages, config.page_size)
    limits = SchedulerLimits(
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        context_length=config.context_length,
        encode_patches=config.encode_patches,
    )
    bytes_per_token = spec.embedding_width * DTYPES[config.dtype].itemsize
    prefix = PrefixCache(pool) if config.prefix_cache else None
    return Scheduler(limits, pool, prefix, EmbeddingCache(config.embedding_bytes, bytes_per_token), spec.eos_token_ids)


def pick_dtype(model: ModelOptions, folder: Path) -> Dtype:
    """The dtype asked for, else the checkpoint's own; bfloat16 where that is none the engine computes in."""
    wanted = read_checkpoint(folder).dtype() if model.dtype == "auto" else model.dtype
    known: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    return known.get(wanted, "bfloat16")


def pick_device(model: ModelOptions) -> torch.device:
    """Raises ConfigError when cuda is asked for and there is none."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda" if model.device != "cpu" and torch.cuda.is_available() else "cpu")


def measure_hardware(device: torch.device) -> Hardware:
    """What the device is and what it has left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Hardware("cuda", torch.cuda.get_device_name(device), total, free)
    memory = psutil.virtual_memory()
    return Hardware("cpu", f"{torch.get_num_threads()} threads", memory.total, memory.available)


if __name__ == "__main__":
    sys.exit(main())
