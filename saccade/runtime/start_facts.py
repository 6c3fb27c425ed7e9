"""What start-up finds out about a network on this machine, and the kernels that it compiles
meanwhile. Both are kept on disk, so the next start of the same reads one small file.

Owns the words that say what "the same" is: the machine, every version, this package's source, the
checkpoint's files, and what decides the shapes of steps. Whatever differs is found out again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from saccade.core.config import EngineConfig
from saccade.core.decoders import json_decoder
from saccade.ipc.messages import Load
from saccade.kernels.x86 import kept_files
from saccade.kernels.x86.cpu_info import IDENTITY, first_processor
from saccade.kernels.x86.kept_files import TALLY
from saccade.runtime.cuda.warm import TRIAL_TOKENS

SETTINGS = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MKL_", "NUMBA_", "OMP_", "ONEDNN_")
"""Beginnings of the names of settings that choose how numbers are computed."""
TRIAL_PAGES = 1 + TRIAL_TOKENS
"""KV pages past which measuring uses no more."""
PROCESSOR = (*IDENTITY, "microcode", "cache size")
"""What /proc/cpuinfo says of what a processor can do."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What is kept of a start. `kernels`: names of the files with the code that it needed."""

    batch_invariant: bool
    kernels: tuple[str, ...]


def find_facts(words: str, find_out: Callable[[], bool]) -> tuple[bool, str]:
    """Return whether rows are exact, as `messages.Begun` means it, and what was done to know it.

    Takes both from the last start with the same words, if its kernels are all still there.
    Otherwise calls `find_out`, which compiles every kernel. Nothing is kept under empty words.
    """
    if words and (found := _read(words)) is not None:
        return found.batch_invariant, f"{_count(found.kernels)} and exact rows kept from last start"
    batch_invariant = find_out()
    done = f"{_count(TALLY.made)} compiled, exact rows measured"
    if words:
        facts = StartFacts(batch_invariant, tuple(sorted({*TALLY.made, *TALLY.found})))
        kept_files.keep(words, msgspec.json.encode(facts))
    return batch_invariant, done


def _count(kernels: Sequence[str]) -> str:
    return f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}"


def _read(words: str) -> StartFacts | None:
    content = kept_files.look(words)
    if content is None:
        return None
    with suppress(msgspec.MsgspecError):
        found = json_decoder(StartFacts).decode(content)
        if all(map(kept_files.there, found.kernels)):
            return found
    return None


def describe_network(load: Load, folder: Path) -> str:
    """Return words that differ whenever another network, or another way to compute it, is meant.

    Returns "" for several ranks, which measure together.
    """
    if load.parallel.ranks > 1:
        return ""
    settings = sorted(each for each in os.environ.items() if each[0].startswith(SETTINGS))
    versions = platform.python_version(), torch.__version__, torch.__config__.show()
    files = sorted(
        (entry.name, stat.st_size, stat.st_mtime_ns)
        for entry in os.scandir(folder)
        if entry.is_file() and (stat := entry.stat())
    )
    said = repr(load), repr(files), *versions, repr(settings), _processor(), source_digest()
    return "\n".join(said)


def describe_steps(config: EngineConfig) -> str:
    """Return words for what decides the shapes of steps, and how they are computed."""
    shapes = config.dtype, config.max_running, config.chunk_tokens, config.context_length
    kept = config.page_size, min(TRIAL_PAGES, config.kv_pages), config.kv.dtype, config.kv.scales
    return repr((*shapes, *kept, config.kv.attention, config.encoder))


def source_digest() -> str:
    """Return a digest over this package's source."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """Return the processor's name, stepping, microcode and flags, and what PyTorch uses of them."""
    used = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), platform.machine()
    said = {name: first_processor().get(name, "") for name in PROCESSOR}
    return repr((used, said))
