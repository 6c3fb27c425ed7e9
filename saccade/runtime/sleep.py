"""Memory for KV pages and states that is given back: by a sleeping model, which takes it again, and
of pages that hold nothing.

Owns the list of memory given back. All views of the tensors stay. They are whole again, but empty,
once memory is taken. Knows nothing of askers and times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from saccade.core.plan import FreeMemory, Memory
from saccade.ipc.memory import give_back, resident_bytes, trim


class GivenBack:
    """The memory that can be given back. `asleep`: what is given back now. `runtime/worker.py`
    handles the weights.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the memory behind KV pages and states. Only views share it with `tensors`."""
        self.asleep: tuple[Memory, ...] = ()
        self._storages = [each.untyped_storage() for each in tensors]
        self._sizes: Sequence[int] = [each.nbytes() for each in self._storages]

    @property
    def nbytes(self) -> int:
        """Present bytes in KV pages and states."""
        return sum(each.nbytes() for each in self._storages)

    def give_back(self, memory: Memory) -> None:
        if memory not in self.asleep:
            self.asleep = (*self.asleep, memory)
        if memory == "kv_cache":
            for each in self._storages:
                each.resize_(0)

    def take_back(self, memory: Memory) -> None:
        """Allocate the memory again.

        Raises RuntimeError or MemoryError where there is too little. Then all stays given back.
        """
        if memory == "kv_cache":
            try:
                for each, size in zip(self._storages, self._sizes, strict=True):
                    each.resize_(size)
            except (RuntimeError, MemoryError):
                self.give_back(memory)
                raise
        self.asleep = tuple(each for each in self.asleep if each != memory)


def return_free(caches: Iterable[torch.Tensor], pages: int, free: FreeMemory) -> int:
    """Return memory that holds nothing to the system, on the host.

    `caches`: tensors of so many KV pages each. Returns the bytes of these.
    """
    before = resident_bytes()
    for cache in caches:
        each = cache.nbytes // pages
        for first, count in free.pages if cache.untyped_storage().nbytes() else ():  # not asleep
            give_back(cache.data_ptr() + first * each, count * each)
    freed = max(0, before - resident_bytes())
    trim()
    return freed


def let_go(like: torch.Tensor) -> None:
    """Return cached free memory to the system, on the host and on the device of `like`."""
    gc.collect()
    trim()
    if like.is_cuda:
        torch.cuda.empty_cache()
