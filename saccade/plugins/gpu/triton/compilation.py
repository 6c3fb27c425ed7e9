"""Compiles all kernels that some work launches, several at a time.

Triton compiles a kernel where it is first launched, one after another, and the work waits for each.
Here the work is done twice. At first a kernel that is not compiled yet is noted and left out, then
all those are compiled in threads (which wait for ptxas, and for passes that release the GIL).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

MAX_THREADS = 16

EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class ZeroedMemory(TorchDispatchMode):
    """Fills new tensors with zeros.

    What a left-out kernel would have written to them may be read as an index.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in EMPTY else made


def compile_abreast(work: Callable[[], object], device: torch.device, ranks: int = 1) -> int:
    """Compile what `work` would launch, and return how many kernels that was.

    Does `work` once, without the kernels that are still to be compiled: its results are worthless.
    ranks: processes that compile on this machine at the same time.
    """
    if knobs.runtime.interpret:
        return 0
    # An error shows when the work is done in earnest; ranks must do the same until then.
    forgiving = suppress(Exception) if ranks == 1 else nullcontext()
    with _noted() as kernels, ZeroedMemory(), forgiving:
        work()
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))
    take_device = partial(torch.cuda.set_device, _index(device)) if device.type == "cuda" else None
    found = list(kernels.values())
    with ThreadPoolExecutor(threads, "compile", take_device) as pool:
        missed = [each for each, done in zip(found, pool.map(_compile, found)) if not done]
    # ptxas and the cache on disk are shared: what failed beside others may pass alone.
    with ThreadPoolExecutor(1, "compile", take_device) as pool:
        pool.map(_compile, missed)
    return len(kernels)


def _index(device: torch.device) -> int:
    """Return which GPU that is: a device without an index is the one that this thread uses."""
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def _noted() -> Iterator[dict[str, tuple[Any, str]]]:
    kernels: dict[str, tuple[Any, str]] = {}

    def note(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        kernels[data] = fn.jit_function, data
        return True  # it is neither compiled nor launched

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before


def _compile(kernel: tuple[Any, str]) -> bool:
    """Compile a noted kernel. Returns False where that fails."""
    function, data = kernel
    try:
        function.preload(data)
    except Exception:  # the launch compiles it again, and says what is wrong
        return False
    return True
