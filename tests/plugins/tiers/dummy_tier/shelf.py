"""A store that nobody serves with: all that a new tier needs, in one file."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from blake3 import blake3

from saccade.plugins.tiers.items import Damaged, Items, Memory
from saccade.runtime.tiers import Ready, values_of

K = TypeVar("K", bound=Hashable)
SUM = 32
"""Bytes of a checksum, which values follow."""


class Shelf(Generic[K]):
    what, shared = "shelf", ""

    def __init__(self, root: Path, items: Items[K], memory: Memory, _nbytes: int) -> None:
        self._items, self._memory, self._folder = items, memory, root / items.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self.found: tuple[tuple[K, int], ...] = ()

    def name(self, key: K) -> str:
        return self._items.file(key)

    def _path(self, key: K) -> Path:
        return self._folder / self.name(key)

    def has(self, key: K) -> bool:
        return self._path(key).exists()

    def put(self, key: K, rows: torch.Tensor, ready: Ready) -> None:
        assert ready is None, "on a CPU"
        path = self._path(key)
        try:
            path.write_bytes(blake3(self.name(key).encode() + values_of(rows)).digest())
            with path.open("ab") as file:
                file.write(values_of(rows))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            self._memory.give_rows(rows)

    def get(self, key: K, size: int) -> tuple[torch.Tensor, Ready]:
        told = self._path(key).read_bytes()
        lent = self._memory.lend(size)
        rows = self._items.empty(size) if lent is None else lent
        values = values_of(rows)
        right = blake3(self.name(key).encode() + told[SUM:]).digest() == told[:SUM]
        if not right or len(told) != SUM + len(values):
            self._memory.give_rows(rows)
            self.drop(key)
            raise Damaged("it is not what was put")
        values[:] = told[SUM:]
        return rows, None

    def drop(self, key: K) -> None:
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None: ...


STORE = Shelf
