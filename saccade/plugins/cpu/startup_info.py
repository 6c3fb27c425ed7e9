"""Measures at start-up whether a network is batch-invariant on this machine, and compiles its
kernels. Both results are cached on disk, so the next start reads one small file instead.

The cache key covers the CPU, all versions, this package's source, the checkpoint's files, and the
options that determine the shapes of steps. If any of these changes, start-up measures again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from saccade.core.config import EngineConfig
from saccade.core.decoders import json_decoder
from saccade.plugins.cpu import disk_cache
from saccade.plugins.cpu.cpu_info import IDENTITY, first_processor
from saccade.plugins.cpu.disk_cache import USED_FILES
from saccade.runtime.batch import Frame
from saccade.runtime.start import TRIAL_TOKENS, Origin, Start

SETTINGS = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MKL_", "NUMBA_", "OMP_", "ONEDNN_")
"""Prefixes of the environment variables that may change how results are computed."""
TRIAL_PAGES = 1 + TRIAL_TOKENS
"""Maximum number of KV pages that the measurement uses."""
CPU_FIELDS = (*IDENTITY, "microcode", "cache size")
"""Fields of /proc/cpuinfo that may affect results."""


@dataclass(frozen=True, slots=True)
class StartupInfo:
    """The results of an earlier start-up, which are cached on disk."""

    batch_invariant: bool  # as in `messages.Started`
    kernels: tuple[str, ...]  # names of the cached files with the kernels that it used


def prepare(start: Start) -> tuple[bool, str]:
    """Compile the network's kernels, and find out whether it is batch-invariant. Implements
    `runtime.start.Prepare`.
    """
    words = "" if start.origin is None else describe_network(start.origin)
    words = words and f"{words}\n{describe_steps(start.config)}"
    return load_or_measure(words, partial(_measure, start))


def _measure(start: Start) -> bool:
    from saccade.runtime.batch_invariance import rows_are_batch_invariant

    warm_up_kernels(start)
    parts = start.net, start.attention, start.batcher, start.embeddings, start.config
    return rows_are_batch_invariant(*parts)


@torch.inference_mode()
def warm_up_kernels(start: Start) -> None:
    """Run one padding token through the network, sample a token, and encode two small images.

    This compiles all kernels, because on a CPU the same kernels are used for any batch size. All
    ranks must call this together.
    """
    net, attention, batcher = start.net, start.attention, start.batcher
    batch = batcher.idle(Frame.decode(1))
    attention.plan(batch)
    net.forward(batch, attention)
    if start.records:
        net.ops.record(lambda: (net.forward(batch, attention),))
    if start.sampler is not None:
        start.sampler.warm_up()
    start.encoder.warm_up()


def load_or_measure(words: str, find_out: Callable[[], bool]) -> tuple[bool, str]:
    """Return whether results are batch-invariant, as in `messages.Started`, and how this was
    determined.

    Uses the cached result of the last start with the key `words`, if all of its kernels are still
    cached. Otherwise calls `find_out`, which compiles every kernel. The result is not cached if
    `words` is empty.
    """
    if words and (found := _read(words)) is not None:
        return found.batch_invariant, f"{_count(found.kernels)} and exact rows kept from last start"
    batch_invariant = find_out()
    done = f"{_count(USED_FILES.made)} compiled, exact rows measured"
    if words:
        facts = StartupInfo(batch_invariant, tuple(sorted({*USED_FILES.made, *USED_FILES.found})))
        disk_cache.store(words, msgspec.json.encode(facts))
    return batch_invariant, done


def _count(kernels: Sequence[str]) -> str:
    return f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}"


def _read(words: str) -> StartupInfo | None:
    content = disk_cache.load(words)
    if content is None:
        return None
    with suppress(msgspec.MsgspecError):
        found = json_decoder(StartupInfo).decode(content)
        if all(map(disk_cache.is_cached, found.kernels)):
            return found
    return None


def describe_network(origin: Origin) -> str:
    """Return a cache key that identifies the network and everything that affects how it is
    computed.

    Returns "" for several ranks, because they measure together and none of them can skip it.
    """
    load, folder = origin.load, origin.folder
    if load.parallel.ranks > 1:
        return ""
    settings = sorted(each for each in os.environ.items() if each[0].startswith(SETTINGS))
    versions = platform.python_version(), torch.__version__, torch.__config__.show()
    files = sorted(
        (entry.name, stat.st_size, stat.st_mtime_ns)
        for entry in os.scandir(folder)
        if entry.is_file() and (stat := entry.stat())
    )
    said = repr(load), repr(files), *versions, repr(settings), _describe_cpu(), source_digest()
    return "\n".join(said)


def describe_steps(config: EngineConfig) -> str:
    """Return a cache key that identifies the options that determine the shapes of steps and how
    they are computed.
    """
    shapes = config.dtype, config.max_running, config.chunk_tokens, config.context_length
    kept = config.page_size, min(TRIAL_PAGES, config.kv_pages), config.kv.dtype, config.kv.scales
    return repr((*shapes, *kept, config.kv.attention, config.encoder))


def source_digest() -> str:
    """Return a digest of all of Saccade's source code."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _describe_cpu() -> str:
    """Return a string with the CPU's model, stepping, microcode and flags, and the features that
    PyTorch uses.
    """
    used = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), platform.machine()
    said = {name: first_processor().get(name, "") for name in CPU_FIELDS}
    return repr((used, said))
