"""Releases the memory of KV pages and states while a model sleeps, and allocates it again.

All views of the tensors remain valid. After the memory is allocated again, its contents are
undefined.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from saccade.core.plan import Memory
from saccade.ipc.memory import trim


class GivenBack:
    """The memory that can be released.

    asleep: the types of memory that are currently released.

    `worker_changes.py` releases the weights.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Store the storages of KV pages and states. They may be shared with `tensors` only by
        views.
        """
        self.asleep: tuple[Memory, ...] = ()
        self._storages = [each.untyped_storage() for each in tensors]
        self._sizes: Sequence[int] = [each.nbytes() for each in self._storages]

    @property
    def nbytes(self) -> int:
        """The number of bytes that KV pages and states currently take."""
        return sum(each.nbytes() for each in self._storages)

    def give_back(self, memory: Memory) -> None:
        if memory not in self.asleep:
            self.asleep = (*self.asleep, memory)
        if memory == "kv_cache":
            for each in self._storages:
                each.resize_(0)

    def take_back(self, memory: Memory) -> None:
        """Allocate the memory again.

        Raises RuntimeError or MemoryError if there is too little free memory. Then all of it
        remains released.
        """
        if memory == "kv_cache":
            try:
                for each, size in zip(self._storages, self._sizes, strict=True):
                    each.resize_(size)
            except (RuntimeError, MemoryError):
                self.give_back(memory)
                raise
        self.asleep = tuple(each for each in self.asleep if each != memory)


def let_go(like: torch.Tensor) -> None:
    """Release unused memory in allocators' caches to the system, on the host and on the device of
    `like`.
    """
    gc.collect()
    trim()
    if like.is_cuda:
        torch.cuda.empty_cache()
