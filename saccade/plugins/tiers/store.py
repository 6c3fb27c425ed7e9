"""The interface of a tier whose methods block. `background.py` calls them from a thread.

Each store is a module of this package, opened by its name.
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeVar

from saccade.plugins.tiers.items import Items, Memory
from saccade.runtime.tiers import Tier

K = TypeVar("K", bound=Hashable)


class Store(Tier[K], Protocol[K]):
    """A tier whose methods block, such as a directory on disk."""

    what: str  # its name in logs
    found: tuple[tuple[K, int], ...]  # (key, size) left by an earlier run, the oldest first
    shared: str  # the directory in which other servers find the same items, or ""

    def name(self, key: K) -> str: ...

    def close(self) -> None: ...


def open_store(name: str, root: Path, items: Items[K], memory: Memory, nbytes: int) -> Store[K]:
    """Open the store whose class the module `name` exports as `STORE`. Raises OSError with the
    reason.
    """
    store: Store[K] = import_module(f"{__package__}.{name}").STORE(root, items, memory, nbytes)
    return store
