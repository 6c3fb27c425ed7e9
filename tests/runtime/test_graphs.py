"""Graphs: which size is replayed, what padding may touch, whose memory the outputs are, how sizes
follow the traffic.

A capture without CUDA is the function itself, on the same buffers as a graph would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade.core.config import EncoderConfig
from saccade.core.metrics import Metrics
from saccade.families.qwen_vl.vision import VisionTower
from saccade.nn.protocol import FamilyNet, Pack
from saccade.plugins.gpu.cuda.graphs import (
    ENOUGH,
    MISSES,
    GraphRunner,
    Replay,
    best_sizes,
    eager,
    padded,
)
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks, segment_bounds, segments_that_fit
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade_bench.lab.qwen import grids, qwen
from tests.families.forwarding import encode, load
from tests.fixtures.tiny import picture


class Doubling:
    """Twice the input; counts what it computes, by size."""

    def __init__(self, largest: int) -> None:
        self.input, self.result = torch.zeros(largest), torch.zeros(largest)
        self.computed: Counter[int] = Counter()

    def inputs(self, size: int) -> torch.Tensor:
        return self.input[:size]

    def output(self, size: int) -> torch.Tensor:
        return self.result[:size]

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        self.computed[len(inputs)] += 1
        return inputs * 2


def run(runner: GraphRunner[torch.Tensor], values: list[float]) -> torch.Tensor | None:
    def fill(inputs: torch.Tensor) -> bool:
        inputs.zero_()
        inputs[: len(values)] = torch.tensor(values)
        return True

    return runner.run(len(values), fill)


def test_the_work_of_all_sizes_is_prepared_before_the_first_capture() -> None:
    doubling = Doubling(8)
    captured: list[int] = []

    def prepare(work: Replay) -> None:
        work()
        assert doubling.computed == {2: 1, 8: 1} and not captured

    def capture(work: Replay) -> Replay:
        captured.append(1)
        return work

    GraphRunner(doubling, [2, 8], capture, prepare=prepare)
    assert len(captured) == 2


def test_the_smallest_graph_that_fits_is_replayed() -> None:
    doubling = Doubling(8)
    captured: list[int] = []

    def capture(work: Replay) -> Replay:
        captured.append(1)
        return eager(work)

    runner = GraphRunner(doubling, [4, 8, 2], capture)
    assert runner.sizes == [2, 4, 8] and len(captured) == 3
    doubling.computed.clear()
    for size in (1, 2, 3, 5, 8, 4):
        output = run(runner, [1.0] * size)
        assert output is not None and output.tolist() == [2.0] * size + [0.0] * (len(output) - size)
    assert run(runner, [1.0] * 9) is None
    assert doubling.computed == {2: 2, 4: 2, 8: 2}


def test_the_largest_is_captured_first() -> None:
    doubling = Doubling(8)
    GraphRunner(doubling, [2, 8, 4], eager)
    assert list(doubling.computed) == [8, 4, 2]


def test_deferred_graphs_are_captured_one_per_call_and_run_eagerly_until_then() -> None:
    runner = GraphRunner(Doubling(8), [2, 4, 8], eager, defer=True)
    assert runner.sizes == [8]
    assert run(runner, [1.0] * 3) is None, "no graph pads 3 rows to 8"
    assert run(runner, [1.0] * 5) is not None
    assert runner.capture_next() and runner.sizes == [4, 8]
    assert not runner.capture_next() and runner.sizes == [2, 4, 8]
    assert not runner.capture_next()


def test_a_deferred_graph_is_captured_for_a_server_that_is_never_idle() -> None:
    runner = GraphRunner(Doubling(8), [2, 4, 8], eager, defer=True)
    outputs = [run(runner, [1.0] * 3) for _ in range(MISSES + 2)]
    assert outputs[:MISSES] == [None] * MISSES
    assert all(output is not None and len(output) == 4 for output in outputs[MISSES:])
    assert runner.sizes == [4, 8]


def test_inputs_that_do_not_fit_run_elsewhere() -> None:
    doubling = Doubling(8)
    runner = GraphRunner(doubling, [8], eager)
    doubling.computed.clear()
    assert runner.run(3, lambda _: False) is None
    assert not doubling.computed


def test_sizes_follow_the_traffic_but_the_largest_stays() -> None:
    runner = GraphRunner(Doubling(1024), [256, 512, 1024], eager)
    for _ in range(ENOUGH):
        run(runner, [1.0] * 300)
        run(runner, [1.0] * 610)
    captures = 0
    while runner.adapt():
        captures += 1
    assert runner.sizes == [304, 624, 1024]
    assert not runner.adapt(), "settled"
    output = run(runner, [3.0] * 300)
    assert output is not None and len(output) == 304


@pytest.mark.parametrize(
    ("largest", "unit"), [(64, 4), (100, 4), (192, 4), (1000, 4), (8192, 4), (17 * 80, 17)]
)
def test_sizes_that_follow_the_traffic_are_whole_tokens(largest: int, unit: int) -> None:
    """Or whole tiles: what the tower takes in multiples."""
    sizes = [largest // unit // 2 * unit, largest]
    runner = GraphRunner(Doubling(largest), sizes, eager, unit=unit)
    for size in range(unit, min(largest, 200) // 2, unit):
        for _ in range(ENOUGH):
            run(runner, [1.0] * size)
        while runner.adapt():
            pass
    assert all(size % unit == 0 for size in runner.sizes)


def test_little_traffic_and_little_gain_change_nothing() -> None:
    runner = GraphRunner(Doubling(1024), [256, 512, 1024], eager)
    for _ in range(ENOUGH - 1):
        run(runner, [1.0] * 300)
    assert not runner.adapt() and runner.sizes == [256, 512, 1024]
    for _ in range(ENOUGH):
        run(runner, [1.0] * 512)
    assert not runner.adapt() and 512 in runner.sizes


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_best_sizes_need_the_fewest_rows(most: int) -> None:
    seen = Counter({10: 50, 20: 3, 30: 40, 70: 1, 80: 9, 95: 2})
    best = best_sizes(seen, 100, most)
    assert len(best) <= most and best[-1] == 100

    def choices(rest: list[int], count: int) -> list[list[int]]:
        if count == 0 or not rest:
            return [[]]
        return [
            [],
            *(
                [size, *more]
                for i, size in enumerate(rest)
                for more in choices(rest[i + 1 :], count - 1)
            ),
        ]

    fewest = min(padded(seen, [*choice, 100]) for choice in choices(sorted(seen), most - 1))
    assert padded(seen, best) == fewest


def test_padding_is_segments_of_its_own() -> None:
    bounds = segment_bounds([4, 8], size=32, room=6, longest=8)
    assert bounds is not None and bounds.tolist() == [0, 4, 12, 20, 28, 32, 32]
    assert segment_bounds([4, 8], size=32, room=4, longest=8) is None, "no room for the padding"
    full = segment_bounds([32], size=32, room=2, longest=32)
    assert full is not None and full.tolist() == [0, 32, 32]


def graphed(
    net: FamilyNet, sizes: tuple[int, ...], metrics: Metrics | None = None
) -> tuple[PackedEncoder, Counter[int]]:
    """An encoder with eager graphs, and how often each was replayed."""
    replays: Counter[int] = Counter()

    def capture(work: Replay) -> Replay:
        work()
        size = next(size for size in sorted(sizes, reverse=True) if size not in replays)
        replays[size] = 0

        def replay() -> None:
            replays[size] += 1
            work()

        return replay

    positions = PositionCache(net.spec, net.vision, metrics or Metrics())
    config, like = EncoderConfig(graph_sizes=sizes), torch.empty(0)
    graphs = CapturedPacks(net, config, like, capture=capture)
    return PackedEncoder(net, positions, config, like, graphs), replays


def pictures(net: FamilyNet, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    factor = qwen(net.spec).images.factor
    return [torch.from_numpy(picture(h * factor, w * factor, seed=h + w)) for h, w in sizes]


def embed(net: FamilyNet, encoder: PackedEncoder, images: list[torch.Tensor]) -> list[torch.Tensor]:
    return encoder.encode(images, grids(net.spec, images))


@pytest.mark.parametrize(
    "sizes", [[(2, 3)], [(2, 3), (7, 5), (2, 3)], [(4, 4), (1, 9)]], ids=["one", "three", "thin"]
)
def test_a_padded_graph_computes_what_the_tower_computes(
    family: str, checkpoint: Callable[..., Path], sizes: list[tuple[int, int]]
) -> None:
    net = load(checkpoint(family))
    encoder, replays = graphed(net, (64, 256))
    images = pictures(net, sizes)
    rows = sum(4 * h * w for h, w in sizes)
    for ours, expected in zip(embed(net, encoder, images), encode(net, images), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0.0)
    assert replays == ({64: 1, 256: 0} if rows <= 64 else {64: 0, 256: 1})


def test_what_stood_in_the_buffers_before_does_not_matter(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    net = load(checkpoint(family))
    encoder, _ = graphed(net, (256,))
    small = pictures(net, [(2, 3)])
    first = embed(net, encoder, small)[0]
    embed(net, encoder, pictures(net, [(7, 9)]))
    assert torch.equal(embed(net, encoder, small)[0], first)


def test_an_embedding_is_its_owners_alone(family: str, checkpoint: Callable[..., Path]) -> None:
    net = load(checkpoint(family))
    encoder, replays = graphed(net, (256,))
    first = embed(net, encoder, pictures(net, [(2, 3)]))[0]
    kept = first.clone()
    embed(net, encoder, pictures(net, [(3, 3)]))
    assert torch.equal(first, kept)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert replays == {256: 2}


def test_packs_that_are_too_large_run_without_a_graph(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    net = load(checkpoint(family))
    encoder, replays = graphed(net, (64,))
    images = pictures(net, [(7, 5)])
    torch.testing.assert_close(embed(net, encoder, images)[0], encode(net, images)[0])
    assert replays == {64: 0}


def test_packs_of_too_many_segments_run_without_a_graph(checkpoint: Callable[..., Path]) -> None:
    net = load(checkpoint("qwen3_vl"))
    encoder, replays = graphed(net, (64,))
    count = segments_that_fit(64, None) + 1
    images = pictures(net, [(1, 1)] * count)
    assert count * 4 <= 64
    embed(net, encoder, images)
    assert replays == {64: 0}


def test_every_replay_reads_the_same_memory(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph knows its inputs by their addresses."""
    net = load(checkpoint("qwen2_5_vl"))
    seen: list[Pack] = []
    blocks = VisionTower.blocks
    monkeypatch.setattr(
        VisionTower, "blocks", lambda self, pack: (seen.append(pack), blocks(self, pack))[1]
    )
    encoder, _ = graphed(net, (256,))
    embed(net, encoder, pictures(net, [(2, 3)]))
    embed(net, encoder, pictures(net, [(7, 5), (1, 1)]))
    assert len(seen) == 3
    assert (
        len(
            {
                (
                    pack.rows.data_ptr(),
                    pack.places.data_ptr(),
                    *(cut.segments.bounds.data_ptr() for (cut,) in pack.cuts),
                )
                for pack in seen
            }
        )
        == 1
    )
    assert len({tuple(cut.segments.longest for (cut,) in pack.cuts) for pack in seen}) == 1


def test_what_names_a_model_on_disk_goes_through_no_graph(
    checkpoint: Callable[..., Path],
) -> None:
    """Other sizes of graphs may give other bits, and must not empty the tier."""
    net = load(checkpoint("qwen3_vl"))
    replayed: list[None] = []

    def capture(work: Replay) -> Replay:
        return lambda: replayed.append(None)

    positions = PositionCache(net.spec, net.vision, Metrics())
    config, like = EncoderConfig("sdpa", (64,)), torch.empty(0)
    graphs = CapturedPacks(net, config, like, capture=capture)
    encoder = PackedEncoder(net, positions, config, like, graphs)
    side = 3 * qwen(net.spec).images.factor
    pixels = torch.from_numpy(picture(side, side).copy())
    (grid,) = grids(net.spec, [pixels])
    rows = encoder.encode_plainly(pixels, grid)
    assert not replayed and torch.equal(rows, encode(net, [pixels])[0])
    encoder.encode([pixels], [grid])
    assert replayed
