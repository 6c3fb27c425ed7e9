"""The vision tower on a GPU: graphs have the bits of the same work without them, embeddings are
their owners' alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets, EncoderConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import Encode, Move, PixelSlot
from saccade.core.types import ImageKey
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.parallel import UNSHARDED
from saccade.plugins.gpu.cuda.graphs import ENOUGH, Capture, CudaCapture, eager
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks
from saccade.plugins.tiers.embedding_tiers import open_tiers
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.vision.vision_encoder import VisionEncoder
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.qwen import grids, qwen

pytestmark = pytest.mark.gpu

SIZES = [(2, 3), (7, 5), (4, 4), (1, 9)]
BUCKETS = (64, 256)


@pytest.fixture(scope="module", params=["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyNet:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    return load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=torch.device("cuda"))


def encoder(
    net: FamilyNet,
    device: torch.device,
    capture: Capture | None = None,
    sizes: tuple[int, ...] = BUCKETS,
) -> PackedEncoder:
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    config = EncoderConfig("flash", sizes if capture else ())
    graphs = CapturedPacks(net, config, like, capture=capture) if capture else None
    return PackedEncoder(net, PositionCache(net.spec, net.vision, Metrics()), config, like, graphs)


def pixels(net: FamilyNet, sizes: list[tuple[int, int]], seed: int = 0) -> list[np.ndarray]:
    rng, factor = np.random.default_rng(seed), qwen(net.spec).images.factor
    return [
        rng.integers(0, 256, (height * factor, width * factor, 3), np.uint8)
        for height, width in sizes
    ]


def on(device: torch.device, pictures: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(each).to(device) for each in pictures]


def run(net: FamilyNet, ours: PackedEncoder, images: list[torch.Tensor]) -> list[torch.Tensor]:
    return ours.encode(images, grids(net.spec, images))


def test_a_graph_has_the_bits_of_the_same_work_without(net: FamilyNet, cuda: torch.device) -> None:
    graphs, plain = encoder(net, cuda, CudaCapture()), encoder(net, cuda, eager)
    for count in (1, 2, 4, 1):
        pictures = on(cuda, pixels(net, SIZES[:count], seed=count))
        for replayed, computed in zip(
            run(net, graphs, pictures), run(net, plain, pictures), strict=True
        ):
            assert torch.equal(replayed, computed)


def test_padding_does_not_show(net: FamilyNet, cuda: torch.device) -> None:
    pictures = on(cuda, pixels(net, SIZES))
    for padded, exact in zip(
        run(net, encoder(net, cuda, CudaCapture()), pictures),
        run(net, encoder(net, cuda), pictures),
        strict=True,
    ):
        torch.testing.assert_close(padded, exact, atol=0.1, rtol=0.05)
        assert (
            float((padded - exact).float().abs().mean())
            < 0.01 * float(exact.float().abs().mean()) + 1e-3
        )


def test_graphs_that_were_fitted_to_the_traffic_have_the_same_bits(
    net: FamilyNet, cuda: torch.device
) -> None:
    fitted, fresh = encoder(net, cuda, CudaCapture()), encoder(net, cuda, eager, (24, 256))
    pictures = on(cuda, pixels(net, [(2, 3)]))
    for _ in range(ENOUGH):
        run(net, fitted, pictures)
    while fitted.adapt():
        pass
    assert torch.equal(run(net, fitted, pictures)[0], run(net, fresh, pictures)[0])


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_an_embedding_stays_what_it_is_when_others_are_encoded(
    net: FamilyNet, cuda: torch.device, graphs: bool
) -> None:
    """Encode A, keep it, encode B: A is unchanged, and in memory of its own."""
    ours = encoder(net, cuda, CudaCapture() if graphs else None)
    a, b = on(cuda, pixels(net, [(2, 3)], seed=1)), on(cuda, pixels(net, [(3, 2)], seed=2))
    kept = run(net, ours, a)[0]
    copy = kept.clone()
    for _ in range(3):
        other = run(net, ours, b)[0]
    assert torch.equal(kept, copy) and not torch.equal(kept, other)
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert torch.equal(run(net, ours, a)[0], copy)


def test_pictures_encoded_beside_other_work_are_whole_when_they_are_shown(
    net: FamilyNet, cuda: torch.device
) -> None:
    """From the pinned arena, on a stream of its own, while the stream that shows them is busy;
    slots are used again at once.
    """
    arena = Arena.create(1 << 22)
    like = torch.empty(0, dtype=torch.bfloat16, device=cuda)
    vision = VisionEncoder(
        net.spec, encoder(net, cuda, CudaCapture()), arena, like, UNSHARDED, "weights"
    )
    memory = EmbeddingMemory(like.new_empty((0, net.spec.embedding_width)), UNSHARDED)
    plain = encoder(net, cuda, eager)
    busy = torch.randn(2048, 2048, device=cuda)
    reported: list[tuple[ImageKey, float, float]] = []
    for number in range(20):
        pictures = pixels(net, SIZES[: 1 + number % 3], seed=number)
        encodes, offset = [], 0
        for index, picture in enumerate(pictures):
            slot = PixelSlot(offset, *picture.shape[:2])
            offset += picture.nbytes
            arena.view(slot)[:] = picture
            encodes.append(
                Encode(
                    ImageKey(bytes([number, index]), b""),
                    grid := qwen(net.spec).images.grid(*picture.shape[:2]),
                    net.spec.num_patches(grid),
                    slot,
                )
            )
        vision.queue_images(encodes)
        while len(memory) < len(encodes):  # in one step, or a part in each
            for encoded in vision.advance(0 if number % 2 else 50):
                memory.put(encoded.key, encoded.rows, encoded.ready)
        for _ in range(5):
            busy = busy @ busy / 50.0
        shown = memory.gather(
            [(encode.key, 0, net.spec.num_tokens(encode.grid)) for encode in encodes]
        )
        told = 0
        while told < len(encodes):  # their pixels have been read
            ended = vision.ended(wait=True)
            told += len(ended)
            reported += ended
        arena.whole()[:] = 0
        assert torch.equal(shown, torch.cat(run(net, plain, on(cuda, pictures))))
        for encode in encodes:
            memory.move(Move(encode.key, "device", None, 0))
    assert len(reported) == sum(1 + number % 3 for number in range(20)) and all(
        ms > 0 for _, ms, _ in reported
    )


def test_the_arena_is_pinned(
    cuda: torch.device, net: FamilyNet, caplog: pytest.LogCaptureFixture
) -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device=cuda)
    VisionEncoder(net.spec, encoder(net, cuda), Arena.create(1 << 20), like, UNSHARDED, "weights")
    assert caplog.records == []


def test_checkpoints_need_no_weights_to_be_measured(tmp_path: Path, cuda: torch.device) -> None:
    folder = make_checkpoint("tiny-qwen3-vl", tmp_path)
    (folder / "model.safetensors").unlink()
    net = load_net(
        load_spec(folder),
        folder,
        dtype=torch.bfloat16,
        device=cuda,
        load_format="dummy",
    )
    assert run(net, encoder(net, cuda), on(cuda, pixels(net, [(2, 2)])))[0].isfinite().all()


def test_embeddings_survive_the_host_tier_and_its_runs(cuda: torch.device) -> None:
    """More of them than fit side by side, put and brought back in another order."""
    width, rows = 64, 100
    like = torch.empty((0, width), dtype=torch.bfloat16, device=cuda)
    memory = EmbeddingMemory(
        like, UNSHARDED, open_tiers(EmbeddingBudgets(0, rows * width * 2), "", like, 0)
    )
    rng = np.random.default_rng(0)
    held: dict[ImageKey, torch.Tensor] = {}
    for number in range(300):
        if held and (rng.random() < 0.5 or sum(map(len, held.values())) > 60):
            key = list(held)[rng.integers(len(held))]
            memory.move(Move(key, "host", "device", 0))
            assert torch.equal(memory.gather([(key, 0, len(held[key]))]), held[key])
            memory.move(Move(key, "device", None, 0))
            del held[key]
        else:
            key = ImageKey(number.to_bytes(32, "big"), b"")
            embedding = torch.randn(int(rng.integers(1, 40)), width, device=cuda).bfloat16()
            memory.put(key, embedding)
            memory.move(Move(key, "device", "host", 0))
            held[key] = embedding.clone()
