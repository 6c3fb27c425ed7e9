"""A tier that blocks: a file of this folder, opened by its name. One thread does its work
(`background.py`).
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
    """A tier that blocks."""

    what: str  # its name in logs
    found: tuple[tuple[K, int], ...]  # (key, size) left by an earlier run, the oldest first
    shared: str  # the folder where other servers find the same items, or ""

    def name(self, key: K) -> str: ...

    def close(self) -> None: ...


def open_store(name: str, root: Path, items: Items[K], memory: Memory, nbytes: int) -> Store[K]:
    """Open the store of the file `name`, its `STORE`. Raises OSError, with the reason."""
    store: Store[K] = import_module(f"{__package__}.{name}").STORE(root, items, memory, nbytes)
    return store
