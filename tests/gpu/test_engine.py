"""The whole engine on a GPU, in float32: its answers are those of the CPU, and, where it is
installed, of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.core.config import EmbeddingBudgets, EncoderConfig, KVConfig, PageTierConfig
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.plugins.tiers.page_arrivals import ReadRates
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.qwen import qwen
from tests.fixtures.harness import Harness
from tests.helpers.page_tiers import arrivals_of

pytestmark = pytest.mark.gpu
PRESETS = ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"]


@pytest.fixture(scope="module", params=PRESETS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("model"), dtype=torch.float32)


def load(folder: Path, device: str) -> FamilyNet:
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device(device))


def requests(harness: Harness) -> list[Request]:
    """Four, with shared pictures and different ones."""
    spec = harness.net.spec
    placeholder: int = spec.image_token_id  # type: ignore[attr-defined]
    factor, rng = qwen(spec).images.factor, np.random.default_rng(0)
    sizes = [(2, 3), (4, 2), (3, 3), (1, 5)]
    pictures = [
        harness.image(rng.integers(0, 256, (h * factor, w * factor, 3), np.uint8), f"{i}")
        for i, (h, w) in enumerate(sizes)
    ]
    made = []
    for number in range(4):
        shown = pictures[: number + 1]
        tokens = [1, 2, *(token for i, _ in enumerate(shown) for token in (placeholder, 10 + i)), 5]
        made.append(harness.request(f"{number}", tokens, shown, max_tokens=12))
    return made


@pytest.mark.parametrize("chunk_tokens", [7, 2048])
@pytest.mark.parametrize(
    "tiers", [EmbeddingBudgets(64 << 20), EmbeddingBudgets(1, 1 << 20)], ids=["device", "host"]
)
def test_answers_are_those_of_the_cpu(
    folder: Path, cuda: torch.device, tiers: EmbeddingBudgets, chunk_tokens: int
) -> None:
    here, there = (
        Harness(load(folder, "cpu")),
        Harness(load(folder, "cuda"), device="cuda", chunk_tokens=chunk_tokens, embeddings=tiers),
    )
    wanted = {name: outcome.tokens for name, outcome in here.run(requests(here)).items()}
    for _ in range(2):
        outcomes = there.run(requests(there))
        assert {name: outcome.tokens for name, outcome in outcomes.items()} == wanted
    assert set(there.encoded) == set(there.pixels)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_come_back_from_host_memory_with_the_same_answers(
    folder: Path, cuda: torch.device, page_size: int
) -> None:
    """Evicted and asked again: the same tokens, of which none was computed that was cached."""
    pages = PageTierConfig(host_bytes=1 << 26)
    engine = Harness(
        load(folder, "cuda"), device="cuda", page_size=page_size, kv=KVConfig(pages=pages)
    )
    prefix, arrivals = engine.scheduler.prefix, arrivals_of(engine.scheduler)
    assert prefix is not None
    asked = requests(engine)
    engine.run(asked)
    warm = engine.run(asked)
    for _ in range(3):
        arrivals.rates = ReadRates()
        prefix.evict(prefix.evictable)
        for each in asked:
            again = engine.run([each])[each.id]
            assert again.tokens == warm[each.id].tokens
            assert again.cached_tokens == warm[each.id].cached_tokens
    assert arrivals.kept.tiers["host"].counts["read"] > 0


def test_a_picture_is_encoded_once_with_graphs_in_sixteen_bits(
    folder: Path, cuda: torch.device
) -> None:
    net = load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=cuda)
    harness = Harness(
        net,
        device="cuda",
        dtype="bfloat16",
        encoder=EncoderConfig("flash", (64, 256)),
        chunk_tokens=16,
    )
    outcomes = [harness.run(requests(harness)) for _ in range(2)]
    assert sorted(key.digest for key in harness.encoded) == sorted(
        key.digest for key in harness.pixels
    )
    assert all(outcome.finish == ["length"] for each in outcomes for outcome in each.values())


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"),
        *("gemma3", "gemma4", "gemma4_unified", "deepseek_vl_v2", "minicpmv4_6", "minicpmv4_7"),
    ],
)
def test_answers_are_those_of_transformers(family: str, cuda: torch.device, tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="no transformers of a known version",
    )
    from tests.families import answers
    from tests.fixtures.tiny import make_checkpoint

    model = answers.load(make_checkpoint(tmp_path, family))
    there = replace(model, net=load(tmp_path, "cuda"))
    for chunk_tokens in (16, 2048):
        harness = Harness(there.net, device="cuda", chunk_tokens=chunk_tokens)
        answers.check(model, harness.run([there.request(harness, name) for name in answers.CASES]))


@pytest.mark.parametrize(
    "tiers", [EmbeddingBudgets(64 << 20), EmbeddingBudgets(1, 1 << 20)], ids=["device", "host"]
)
def test_tiles_of_other_pictures_are_copied(
    tmp_path: Path, cuda: torch.device, tiers: EmbeddingBudgets
) -> None:
    """Beside rows that decode, and from host memory: answers are the CPU's."""
    folder = make_checkpoint("tiny-internvl", tmp_path / "model", dtype=torch.float32)
    here, there = (
        Harness(load(folder, "cpu")),
        Harness(load(folder, "cuda"), device="cuda", embeddings=tiers),
    )
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (9, 112, 112, 3), np.uint8)
    shown = {"a": (0, 1, 2, 3, 4), "b": (0, 1, 5, 3, 6), "c": (0, 1, 5, 7, 8), "d": (0, 1, 5, 3, 8)}

    def asked(harness: Harness) -> list[Request]:
        (mark,) = harness.net.spec.placeholder.marks  # type: ignore[attr-defined]
        return [
            harness.request(
                name,
                [1, 2, mark, 5],
                [harness.image(np.concatenate([tiles[i] for i in picked]), name)],
                max_tokens=12,
            )
            for name, picked in shown.items()
        ]

    wanted = {request.id: here.run([request])[request.id].tokens for request in asked(here)}
    for number, request in enumerate(asked(there)):
        assert there.run([request], depth=2)[request.id].tokens == wanted[request.id], number
    together = there.run(asked(there), depth=2)
    assert {name: outcome.tokens for name, outcome in together.items()} == wanted
    assert there.scheduler.counts.tiles_seen >= 3 + 3
