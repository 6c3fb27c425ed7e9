"""Caches data that depend only on an image's grid.

These are the position tensors of the vision encoder (`GridFacts`, on the device), and the rotary
positions of image tokens (on the CPU). The model family computes both.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from saccade.core.config import POSITION_CACHE_BYTES
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Grid
from saccade.nn.protocol import GridFacts, VisionNet

Kind = Literal["encoder", "text"]


class PositionCache:
    """An LRU cache of image positions for one network, limited to `budget` bytes.

    A single entry may be larger than the budget. A budget of 0 disables the cache.
    """

    def __init__(
        self,
        spec: FamilySpec,
        vision: VisionNet,
        metrics: Metrics,
        budget: int = POSITION_CACHE_BYTES,
    ) -> None:
        self.spec = spec
        self._vision = vision
        self._metrics = metrics
        self._budget = budget
        self._entries: LRUCache[tuple[Kind, Grid], GridFacts | npt.NDArray[np.int64]] = LRUCache(
            budget, getsizeof=lambda value: min(value.nbytes, budget)
        )

    def replace(self, vision: VisionNet) -> None:
        """Clear the cache and use another vision encoder, which must have the same shape."""
        self._vision = vision
        self._entries.clear()

    def facts(self, grid: Grid) -> GridFacts:
        """Return the vision encoder's position tensors for a grid."""
        if (known := self._find("encoder", grid)) is None:
            known = self._vision.grid_facts(grid)
            self._keep("encoder", grid, known)
        assert isinstance(known, GridFacts)
        return known

    def image(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Return the rotary positions of an image's tokens (`FamilySpec.image_positions`)."""
        if (known := self._find("text", grid)) is None:
            known = self.spec.image_positions(grid)
            known.setflags(write=False)
            self._keep("text", grid, known)
        assert isinstance(known, np.ndarray)
        return known

    def _find(self, kind: Kind, grid: Grid) -> GridFacts | npt.NDArray[np.int64] | None:
        known = self._entries.get((kind, grid))
        self._metrics.inc(
            "saccade_position_cache_lookups_total",
            kind=kind,
            outcome="miss" if known is None else "hit",
        )
        return known

    def _keep(self, kind: Kind, grid: Grid, value: GridFacts | npt.NDArray[np.int64]) -> None:
        if not self._budget:
            return
        self._entries[kind, grid] = value
        held = sum(each.nbytes for each in self._entries.values())
        self._metrics.set("saccade_position_cache_bytes", held)
