"""What follows from a grid alone is computed once, kept within a budget, and right after it was
forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.config import EncoderConfig
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.types import Grid
from saccade.nn.protocol import FamilyNet, GridFacts
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade_bench.lab.qwen import grids
from tests.families.forwarding import load
from tests.fixtures.tiny import picture

A, B, C = (1, 4, 6), (1, 8, 4), (1, 2, 2)


class Counting:
    """A network's tower and spec, counting what they compute."""

    def __init__(self, net: FamilyNet) -> None:
        self._net = net
        self.computed: Counter[tuple[str, Grid]] = Counter()

    def __getattr__(self, name: str) -> object:
        return getattr(self._net.vision, name)

    def grid_facts(self, grid: Grid) -> GridFacts:
        self.computed["encoder", grid] += 1
        return self._net.vision.grid_facts(grid)

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        self.computed["text", grid] += 1
        return self._net.spec.image_positions(grid)

    def positions(self, *args: object) -> object:
        return self._net.spec.positions(*args)  # type: ignore[arg-type]


def lookups(metrics: Metrics, kind: str) -> tuple[float, float]:
    """(misses, hits)"""
    name = "saccade_position_cache_lookups_total"
    return metrics.value(name, kind=kind, outcome="miss"), metrics.value(
        name, kind=kind, outcome="hit"
    )


def cache(net: FamilyNet, budget: int = 1 << 30) -> tuple[PositionCache, Counting, Metrics]:
    counting, metrics = Counting(net), Metrics()
    return PositionCache(counting, counting, metrics, budget), counting, metrics  # type: ignore[arg-type]


def test_a_grid_is_computed_once(family: str, checkpoint: Callable[..., Path]) -> None:
    known, counting, metrics = cache(load(checkpoint(family)))
    first = {grid: known.facts(grid) for grid in (A, B)}
    for grid in (B, A, A, B, A):
        assert known.facts(grid) is first[grid]
    positions = known.image(A)
    assert all(known.image(A) is positions for _ in range(3))
    assert counting.computed == {("encoder", A): 1, ("encoder", B): 1, ("text", A): 1}
    assert lookups(metrics, "encoder") == (2, 5)
    assert lookups(metrics, "text") == (1, 3)


def test_encoding_a_grid_again_recomputes_nothing(checkpoint: Callable[..., Path]) -> None:
    net = load(checkpoint("qwen2_5_vl"))
    known, counting, metrics = cache(net)
    encoder = PackedEncoder(net, known, EncoderConfig(), torch.empty(0))
    image, other = torch.from_numpy(picture(56, 84)), torch.from_numpy(picture(84, 56))
    encoder.encode([image, image], grids(net.spec, [image, image]))
    encoder.encode([image, other], grids(net.spec, [image, other]))
    assert counting.computed == {("encoder", (1, 4, 6)): 1, ("encoder", (1, 6, 4)): 1}
    assert lookups(metrics, "encoder") == (2, 2)


def test_the_least_recently_used_goes_when_the_budget_is_spent(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    net = load(checkpoint(family))
    sizes = {grid: net.vision.grid_facts(grid).nbytes for grid in (A, B, C)}
    known, counting, metrics = cache(net, budget=sizes[A] + sizes[B])
    known.facts(A)
    known.facts(B)
    assert metrics.value("saccade_position_cache_bytes") == sizes[A] + sizes[B]
    known.facts(A)
    known.facts(C)  # B has waited longest
    assert metrics.value("saccade_position_cache_bytes") == sizes[A] + sizes[C]
    known.facts(A)
    known.facts(B)
    assert counting.computed == {("encoder", A): 1, ("encoder", B): 2, ("encoder", C): 1}


def test_what_is_larger_than_the_budget_is_kept_until_the_next_comes(
    checkpoint: Callable[..., Path],
) -> None:
    known, counting, _ = cache(load(checkpoint("qwen3_vl")), budget=1)
    assert known.facts(A) is known.facts(A)
    known.facts(B)
    known.facts(A)
    assert counting.computed["encoder", A] == 2


def test_kept_positions_cannot_be_changed(checkpoint: Callable[..., Path]) -> None:
    spec: FamilySpec = load(checkpoint("qwen3_vl")).spec
    known, _, _ = cache(load(checkpoint("qwen3_vl")))
    assert not known.image(A).flags.writeable
    assert np.array_equal(known.image(A), spec.image_positions(A))
