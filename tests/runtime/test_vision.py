"""The encoder of plans: work that is spread over steps, and what it reports of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import Encode, PixelSlot
from saccade.core.types import ImageKey
from saccade.nn.protocol import FamilyNet
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks
from saccade.runtime.vision import packed_encoder as encoder
from saccade.runtime.vision.packed_encoder import PackedEncoder, split_segments
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.vision.vision_encoder import VisionEncoder, is_fatal
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import CPU, load
from tests.fixtures.rank_group import ThreadRankGroup, together
from tests.fixtures.tiny import picture

SIZES = [(4, 4), (2, 3), (12, 9), (7, 5)]


class Bench:
    """A `VisionEncoder` and an arena with images in it."""

    def __init__(
        self,
        net: FamilyNet,
        sizes: tuple[int, ...] = (),
        shard: Shard = UNSHARDED,
        mode: str = "weights",
    ) -> None:
        self.net, self.arena, like = net, Arena.create(1 << 22), torch.empty(0)
        known = PositionCache(net.spec, net.vision, Metrics())
        config = EncoderConfig(graph_sizes=sizes)
        graphs = CapturedPacks(net, config, like) if sizes else None
        packed = PackedEncoder(net, known, config, like, graphs)
        self.vision = VisionEncoder(net.spec, packed, self.arena, like, shard, mode)  # type: ignore[arg-type]

    def encodes(self, sizes: list[tuple[int, int]] = SIZES) -> list[Encode]:
        factor, found, offset = qwen(self.net.spec).images.factor, [], 0
        for number, (h, w) in enumerate(sizes):
            pixels = picture(h * factor, w * factor, seed=number)
            slot = PixelSlot(offset, *pixels.shape[:2])
            offset += slot.nbytes
            self.arena.view(slot)[:] = pixels
            key = ImageKey(bytes([number] * 32), bytes(16))
            grid = qwen(self.net.spec).images.grid(*pixels.shape[:2])
            found.append(Encode(key, grid, self.net.spec.num_patches(grid), slot))
        return found

    def run(self, tower: int) -> tuple[dict[ImageKey, torch.Tensor], int]:
        """Embeddings of all, and in how many steps."""
        with torch.inference_mode():
            self.vision.queue_images(self.encodes())
            rows: dict[ImageKey, torch.Tensor] = {}
            steps = 0
            while len(rows) < len(SIZES):
                rows |= {each.key: each.rows for each in self.vision.advance(tower)}
                steps += 1
        return rows, steps


def patch_blocks(net: FamilyNet, sizes: list[tuple[int, int]]) -> int:
    return sum(4 * h * w for h, w in sizes) * net.vision.depth


@pytest.mark.first
@pytest.mark.parametrize("graphs", [(), (256, 1024)], ids=["eager", "graphs"])
def test_embeddings_have_the_same_bits_in_however_many_steps(
    family: str,
    checkpoint: Callable[..., Path],
    graphs: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "CPU_PACK", 200)
    monkeypatch.setattr(encoder, "CPU_CHUNK_ROWS", 64)
    net = load(checkpoint(family))
    whole, steps = Bench(net, graphs).run(0)
    assert steps == 1
    total = patch_blocks(net, SIZES)
    for tower in (1, 7, 500, 10**9):
        rows, steps = Bench(net, graphs).run(tower)
        assert steps == -(-total // tower)
        for key, wanted in whole.items():
            assert torch.equal(rows[key], wanted)


def test_a_step_spends_what_it_may_and_a_small_image_passes_a_large_one(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CPU_PACK", 100)
    monkeypatch.setattr(encoder, "CPU_CHUNK_ROWS", 64)
    net = load(checkpoint("qwen3_vl"))
    done: list[int] = []
    attend = net.ops.towers["sdpa"]

    def note(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        done.append(len(q))
        return attend(q, *rest)

    monkeypatch.setattr(net.ops, "towers", {"sdpa": note})
    bench = Bench(net)
    encodes = bench.encodes()
    bench.vision.queue_images(encodes)
    ended: list[ImageKey] = []
    told: list[ImageKey] = []
    with torch.inference_mode():
        for step in range(1, 1000):
            for each in bench.vision.advance(160):
                ended.append(each.key)
            assert sum(done) <= 160 * step
            told += [key for key, _, _ in bench.vision.ended()]
            assert told == ended
            if len(ended) == len(encodes):
                break
    first, second, large, small = (encode.key for encode in encodes)
    assert ended == [first, second, small, large]
    assert sum(done) == patch_blocks(net, SIZES)


def test_images_that_begin_later_wait_for_those_before_that_are_no_larger(
    checkpoint: Callable[..., Path],
) -> None:
    net = load(checkpoint("qwen3_vl"))
    bench = Bench(net)
    sizes = [(2, 3), (4, 4)]
    first, second = bench.encodes(sizes)
    with torch.inference_mode():
        bench.vision.queue_images([first])
        assert bench.vision.advance(1) == []
        bench.vision.queue_images([second])
        cost = patch_blocks(net, sizes[:1])
        assert [each.key for each in bench.vision.advance(cost - 1)] == [first.key]
        assert bench.vision.advance(1) == []
        assert [each.key for each in bench.vision.advance(0)] == [second.key]


def test_small_images_take_half_of_a_step_from_a_large_one_and_no_more(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, the large one ends in twice the steps."""
    monkeypatch.setattr(encoder, "CPU_PACK", 100)
    net = load(checkpoint("qwen3_vl"))
    bench = Bench(net)
    large, *small = bench.encodes([(12, 9), *[(2, 3)] * 8])
    step = patch_blocks(net, [(2, 3)]) * 2
    ended: list[list[ImageKey]] = []
    with torch.inference_mode():
        bench.vision.queue_images([large])
        steps = -(-patch_blocks(net, [(12, 9)]) // step)
        while not any(large.key in each for each in ended):
            if small:
                bench.vision.queue_images([small.pop()])  # one is new in each step
            ended.append([each.key for each in bench.vision.advance(step)])
    assert all(len(each) == 1 for each in ended[:8]), "each passes in its own step"
    assert steps < len(ended) <= 2 * steps


@pytest.mark.first
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_ranks_end_an_encoding_in_the_same_step_with_the_bits_of_one_step(
    checkpoint: Callable[..., Path], mode: str
) -> None:
    def run(tower: int) -> list[tuple[dict[ImageKey, torch.Tensor], int]]:
        rank_group = ThreadRankGroup(checkpoint("qwen3_vl"), 2, mode)  # type: ignore[arg-type]
        benches = [
            Bench(net, (), shard, mode) for net, shard in zip(rank_group.nets, rank_group.shards)
        ]
        return together(lambda bench: bench.run(tower), benches)

    (whole, _), _ = run(0)
    found = run(100)
    assert found[0][1] == found[1][1] > 3
    for rows, _ in found:
        assert all(torch.equal(rows[key], wanted) for key, wanted in whole.items())


def test_cuts_cover_all_rows_once_and_none_is_too_short() -> None:
    def cuts(lengths: list[int]) -> list[tuple[int, int, int, int, list[int]]]:
        return [
            (
                cut.rows.start,
                cut.rows.stop,
                cut.keys.start,
                cut.keys.stop,
                cut.segments.bounds.tolist(),
            )
            for cut in split_segments(lengths, 10, CPU)
        ]

    assert cuts([4, 4, 0, 4]) == [(0, 8, 0, 8, [0, 4, 8]), (8, 12, 8, 12, [0, 4])]
    assert cuts([2, 25]) == [
        (0, 2, 0, 2, [0, 2]),
        (2, 15, 2, 27, [0, 13]),
        (15, 27, 2, 27, [0, 12]),
    ]
    (whole,) = split_segments([4, 25], None, CPU)
    assert whole.rows == whole.keys == slice(0, 29)


def test_the_end_it_tells_is_that_of_encoding_whatever_the_step_goes_on_to_do(
    checkpoint: Callable[..., Path],
) -> None:
    bench = Bench(load(checkpoint("qwen3_vl")))
    encodes = bench.encodes([(4, 4)])
    begun = time.monotonic()
    bench.vision.queue_images(encodes)
    with torch.inference_mode():
        (encoded,) = bench.vision.advance(0)
    ended = time.monotonic()
    assert len(encoded.rows) == 16
    while time.monotonic() == ended:  # the step goes on
        pass
    ((name, ms, at),) = bench.vision.ended()
    assert name == encodes[0].key and ms > 0 and begun <= at <= ended
    assert bench.vision.ended() == ()


@pytest.mark.parametrize(
    ("error", "kind", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "cuda", False),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "cuda", True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "cuda", True),
        (TypeError("an argument is missing"), "cuda", False),
        (RuntimeError("The size of tensor a (3) must match"), "cpu", False),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_an_error_that_leaves_a_device_unusable_is_not_one_image_s(
    error: Exception, kind: str, fatal: bool
) -> None:
    assert is_fatal(error, torch.device(kind)) is fatal
