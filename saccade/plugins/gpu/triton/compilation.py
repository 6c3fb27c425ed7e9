"""Compiles all kernels that a function launches, several of them at a time.

Triton compiles a kernel at its first launch, one by one, while the caller waits. This module runs
the function twice. In the first run, kernels that are not compiled yet are recorded and skipped.
Then they are compiled in threads: most of the time is in ptxas and in passes that release the GIL.
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

    If the kernel that writes a tensor is skipped, it still contains zeros, which other code may use
    as indices.
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
    """Compile the kernels that `work` launches, and return the number of compiled kernels.

    ranks: the number of processes that compile on this machine at the same time.

    Calls `work` once, and skips launches of kernels that still have to be compiled, so what `work`
    computes in that call is meaningless.
    """
    if knobs.runtime.interpret:
        return 0
    # An error will be raised by the real run. With several ranks, all must fail alike, so it is
    # raised here.
    forgiving = suppress(Exception) if ranks == 1 else nullcontext()
    with _noted() as kernels, ZeroedMemory(), forgiving:
        work()
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))
    take_device = partial(torch.cuda.set_device, _index(device)) if device.type == "cuda" else None
    found = list(kernels.values())
    with ThreadPoolExecutor(threads, "compile", take_device) as pool:
        missed = [each for each, done in zip(found, pool.map(_compile, found)) if not done]
    # ptxas and the disk cache are shared: what failed concurrently may succeed on its own.
    with ThreadPoolExecutor(1, "compile", take_device) as pool:
        pool.map(_compile, missed)
    return len(kernels)


def _index(device: torch.device) -> int:
    """Return the GPU's index. A device without an index is the current one of this thread."""
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def _noted() -> Iterator[dict[str, tuple[Any, str]]]:
    kernels: dict[str, tuple[Any, str]] = {}

    def note(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        kernels[data] = fn.jit_function, data
        return True  # skip both the compilation and the launch

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before


def _compile(kernel: tuple[Any, str]) -> bool:
    """Compile a recorded kernel. Returns False on failure."""
    function, data = kernel
    try:
        function.preload(data)
    except Exception:  # the launch will compile it again, and raise the error
        return False
    return True
