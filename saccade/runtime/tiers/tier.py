"""What every tier answers: items by name, as rows beside the device.

An item is an image's embedding, or a KV page or state. A tier decides nothing: the engine's books
say what it holds. Host memory is reached in the order of the device's streams. A store is a file of
this folder, opened by its name. It blocks, so one thread does its work (`background.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from saccade.runtime.tiers.items import Items, Memory

K = TypeVar("K", bound=Hashable)
Asked = TypeVar("Asked", bound=Hashable, contravariant=True)
Ready = torch.cuda.Event | None
"""When rows are whole; None: in the order of the current stream."""


class Tier(Protocol[Asked]):
    """Items by key. size: rows of an embedding, bytes of a page."""

    def has(self, key: Asked) -> bool:
        """Return True if `get` is worth a try."""
        ...

    def put(self, key: Asked, rows: torch.Tensor, ready: Ready) -> None:
        """Keep rows, which are the tier's from now on. A store raises OSError."""
        ...

    def get(self, key: Asked, size: int) -> tuple[torch.Tensor, Ready]:
        """Return an item's rows. A store raises OSError, and Damaged where they are not what was
        put, which it then drops.
        """
        ...

    def drop(self, key: Asked) -> None: ...


class Store(Tier[K], Protocol[K]):
    """A tier that blocks. what: its name in logs. found: (key, size) left by an earlier run, the
    oldest first. shared: the folder where other servers find the same items, or "".
    """

    what: str
    found: tuple[tuple[K, int], ...]
    shared: str

    def name(self, key: K) -> str: ...

    def close(self) -> None: ...


def open_store(name: str, root: Path, items: Items[K], memory: Memory, nbytes: int) -> Store[K]:
    """Open the store of the file `name`, its `STORE`. Raises OSError, with the reason."""
    store: Store[K] = import_module(f"{__package__}.{name}").STORE(root, items, memory, nbytes)
    return store
